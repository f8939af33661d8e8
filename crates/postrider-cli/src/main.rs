//! The program `postrider`: arguments, configuration, logs, signals and exit codes. What it does stands in the libraries.

mod args;
mod commands;
mod database;
mod demo;
mod fault;
mod outbox;
mod output;
mod setup;
mod signals;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    if rustls::crypto::aws_lc_rs::default_provider().install_default().is_err() {
        eprintln!("warning: another TLS provider is installed in this process");
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: the program cannot start its threads: {error}");
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(dispatch(&cli));
    // Blocked threads (a hanging disk, a resolver) must not keep a stopped program alive.
    runtime.shutdown_background();
    done.unwrap_or_else(|error| fault::report(&error))
}

async fn dispatch(cli: &Cli) -> anyhow::Result<ExitCode> {
    let global = &cli.global;
    match &cli.command {
        Command::Demo(args) => return demo::run(global, args).await,
        Command::DemoRelay(args) => demo::relay::run(args).await?,
        Command::Init(args) => commands::init::run(global, args).await?,
        Command::Run(args) => commands::run::run(global, args).await?,
        Command::Send(args) => commands::send::run(global, args).await?,
        Command::Status(_) => commands::status::run(global).await?,
        Command::List(args) => commands::list::run(global, args).await?,
        Command::Show(args) => commands::show::run(global, args).await?,
        Command::Dead(args) => commands::dead::run(global, args).await?,
    }
    Ok(ExitCode::SUCCESS)
}
