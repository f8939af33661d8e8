//! The command line: what can be asked for, and the words of `--help`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

const ABOUT: &str = "Carries messages from an outbox table to a broker: at least once, and in order per key.

Your application writes a message into the table `outbox` in the same transaction as its own rows. `postrider run` \
reads that table and publishes each message; it is marked as sent only after the sink's own acknowledgement.";

const AFTER: &str = "EXAMPLES
  See it work, with faults, in half a minute and without any server:
      postrider demo

  Without any configuration: a SQLite file and a file of JSON lines in this folder.
      postrider run
      postrider send --topic orders --key order:4711 --id order:4711:paid '{\"n\":1}'     (in a second terminal)
      postrider status

  PostgreSQL to NATS JetStream:
      postrider init --database postgres://owner@db/app
      postrider run  --database postgres://relay@db/app --sink 'nats://broker:4222?stream=ORDERS'

CONFIGURATION
  Flags win over environment variables (POSTRIDER_DATABASE, POSTRIDER_SINK, POSTRIDER_RELAY_LEASE, …), these over the
  file (--config, POSTRIDER_CONFIG, or postrider.toml in this folder), and that over the defaults.

EXIT CODES
  0  done
  1  an error; it says what, where and how to mend it
  2  wrong usage of the command line
  3  there is no such message
  4  `demo` only: the verdict is not \"ok\"
  130, 143  a second SIGINT or SIGTERM ended `run` at once";

/// Heading of the flags of every command: without it they stand between those of the command.
const EVERYWHERE: &str = "Options of every command";

/// The program.
#[derive(Debug, Parser)]
#[command(name = "postrider", version, about = "Carries messages from an outbox table to a broker", long_about = ABOUT, after_long_help = AFTER)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags of every command.
#[derive(Args, Clone)]
pub(crate) struct Global {
    /// Read this configuration file (default: postrider.toml in this folder, if there is one)
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "FILE", env = "POSTRIDER_CONFIG", hide_env_values = true)]
    pub(crate) config: Option<PathBuf>,
    /// Address of the database: sqlite:FILE or postgres://USER@HOST/NAME
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "URL")]
    pub(crate) database: Option<String>,
    /// Address of the sink: file:FILE, stdout: or nats://HOST:PORT
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "URL")]
    pub(crate) sink: Option<String>,
    /// Name of this relay, as people see it (default: the host name)
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "NAME")]
    pub(crate) instance: Option<String>,
    /// Answer with one JSON document on standard output
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub(crate) json: bool,
    /// Form of the log on standard error
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "FORM", value_enum)]
    pub(crate) log_format: Option<LogForm>,
    /// Least severe log lines to write
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "LEVEL", value_enum)]
    pub(crate) log_level: Option<Level>,
}

impl std::fmt::Debug for Global {
    /// Addresses may hold passwords: they are left out.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Global")
            .field("config", &self.config)
            .field("json", &self.json)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogForm {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show a bank, a relay and a consumer at work while faults are injected, and check the result
    #[command(long_about = DEMO_ABOUT)]
    Demo(Demo),
    /// Create or migrate the tables in the database
    #[command(long_about = INIT_ABOUT)]
    Init(Init),
    /// Run the relay until it is told to stop
    #[command(long_about = RUN_ABOUT)]
    Run(Run),
    /// Put one message into the outbox, in a transaction of its own
    #[command(long_about = SEND_ABOUT)]
    Send(Send),
    /// Show relays, shards, backlog, lag and dead messages
    Status(Status),
    /// List messages, newest first
    List(List),
    /// Show what happened to one message, with times
    Show(Show),
    /// Look at dead messages, put them back, or cancel them
    #[command(subcommand)]
    Dead(Dead),
    /// The relay of the demo (internal)
    #[command(name = "__demo-relay", hide = true)]
    DemoRelay(DemoRelay),
}

const DEMO_ABOUT: &str = "Shows a bank, a relay and a consumer at work while faults are injected, and checks the result.

Alice, Bob and others send each other money. Each transfer writes its rows and one message in the same transaction; \
some roll back. A relay, in a process of its own, carries the messages to a file; the file refuses now and then, loses \
answers, and is down once; the relay is killed at the worst moment. A consumer applies each message once.

At the end the books are compared: the bank's table, the file, and the consumer's table. No server is needed, and \
nothing is left behind unless --keep is given. The exit code is 0 only if nothing was lost, invented, reordered or \
applied twice.";

const INIT_ABOUT: &str = "Creates the tables in the database, or brings older ones up to date. Doing it again changes nothing.

With --print the SQL is printed instead, for a DBA to read and run; no connection is made. With --grants the statements \
are printed that give producers, the relay and clean-up the rights they need.

  postrider init --database postgres://owner@db/app
  postrider init --print --database postgres:// > outbox.sql
  postrider init --grants --database postgres:// > grants.sql";

const RUN_ABOUT: &str = "Runs the relay until it is told to stop.

Without any configuration it reads sqlite:postrider.db (created if missing) and writes file:postrider.jsonl, both in \
this folder. Several relays may run on one PostgreSQL outbox: they share the work and take over from each other.

SIGTERM or SIGINT (Ctrl-C): take nothing new, wait for what is in flight, give the work back, exit 0. A second signal \
exits at once; what was in flight is then sent again by the next relay, with the same id.";

const SEND_ABOUT: &str =
    "Puts one message into the outbox, in a transaction of its own. For trying things out: an application \
enqueues in the transaction of its own rows instead.

  postrider send --topic orders --key order:4711 --id order:4711:paid '{\"n\":1}'
  echo -n hello | postrider send --topic greetings -
  postrider send --topic images --bytes --file cat.jpg --content-type image/jpeg

The same id again with the same content is not an error: the message is in the outbox once.";

#[derive(Args, Debug)]
pub(crate) struct Demo {
    /// Transfers to attempt; one in ten rolls back
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(20..=1_000_000))]
    pub(crate) messages: u32,
    /// Draw amounts and faults from this number (default: a fresh one, which is printed)
    #[arg(long, value_name = "S")]
    pub(crate) seed: Option<u64>,
    /// Keep databases and files in this folder, which must be new or empty
    #[arg(long, value_name = "DIR")]
    pub(crate) keep: Option<PathBuf>,
    /// Switch one protection off, to see the check fail
    #[arg(long, value_name = "WHAT", value_enum, hide = true)]
    pub(crate) without: Option<Without>,
}

/// A protection that the demo can do without, to show that its check notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Without {
    /// One undecided message per key.
    Lanes,
    /// SENT only after the acknowledgement.
    Ack,
    /// The consumer's memory of what it has applied.
    Inbox,
    /// The message in the same transaction as the business rows.
    Transaction,
}

#[derive(Args, Debug)]
pub(crate) struct DemoRelay {
    #[arg(long)]
    pub(crate) folder: PathBuf,
    #[arg(long)]
    pub(crate) seed: u64,
    /// Hold the settle that records this many messages as sent until killed.
    #[arg(long)]
    pub(crate) hold_after: Option<u32>,
    /// Be down once after this many publishes.
    #[arg(long)]
    pub(crate) down_after: Option<u32>,
    #[arg(long, value_enum)]
    pub(crate) without: Option<Without>,
}

#[derive(Args, Debug)]
pub(crate) struct Init {
    /// Print the SQL instead of running it; needs only the kind of database (postgres:// or sqlite:)
    #[arg(long)]
    pub(crate) print: bool,
    /// Print the GRANT statements for producers, relay and clean-up
    #[arg(long, conflicts_with = "print")]
    pub(crate) grants: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    /// Offer /livez, /readyz and /metrics on this loopback address, as 127.0.0.1:9464 (port 0 takes any free one)
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct Send {
    /// Where it goes
    #[arg(long, value_name = "TOPIC")]
    pub(crate) topic: String,
    /// What it is kept in order by
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Option<String>,
    /// Its id, by which consumers recognise repeats (default: a new UUID)
    #[arg(long, value_name = "ID")]
    pub(crate) id: Option<String>,
    /// Kind of the event
    #[arg(long, value_name = "TYPE")]
    pub(crate) event_type: Option<String>,
    /// Metadata that travels with it; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = header)]
    pub(crate) header: Vec<(String, String)>,
    /// Media type of the payload (default: application/json if it is JSON)
    #[arg(long, value_name = "TYPE")]
    pub(crate) content_type: Option<String>,
    /// Send it no earlier than after this time, as 5s or 10m
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) delay: Option<Duration>,
    /// Take the payload from this file
    #[arg(long, value_name = "FILE", conflicts_with = "payload")]
    pub(crate) file: Option<PathBuf>,
    /// The payload is bytes, not text
    #[arg(long)]
    pub(crate) bytes: bool,
    /// The payload; `-` reads standard input; absent means a message without payload
    #[arg(value_name = "PAYLOAD", allow_hyphen_values = true)]
    pub(crate) payload: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct Status {}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum State {
    /// Committed, not yet sent: ready and waiting ones
    Pending,
    /// Delayed, or to be tried again
    Waiting,
    Sent,
    Dead,
    Cancelled,
}

#[derive(Args, Debug)]
pub(crate) struct List {
    /// Only messages in this state
    #[arg(long, value_enum)]
    pub(crate) state: Option<State>,
    /// Only messages of this topic
    #[arg(long, value_name = "TOPIC")]
    pub(crate) topic: Option<String>,
    /// Only messages of this key
    #[arg(long, value_name = "KEY")]
    pub(crate) key: Option<String>,
    /// At most this many
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(crate) limit: u32,
}

#[derive(Args, Debug)]
pub(crate) struct Show {
    /// Its message id (or its number in the outbox)
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Show the payload, too
    #[arg(long)]
    pub(crate) payload: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Dead {
    /// List dead messages, the ones written last first
    List(DeadList),
    /// Show a dead message, with its error
    Show(Show),
    /// Put dead messages back: they are sent again, with their attempts at zero
    Redrive(DeadRedrive),
    /// Discard messages for good; recorded with your name and reason
    Cancel(DeadCancel),
}

#[derive(Args, Debug)]
pub(crate) struct DeadList {
    /// Only messages of this topic
    #[arg(long, value_name = "TOPIC")]
    pub(crate) topic: Option<String>,
    /// At most this many
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(crate) limit: u32,
}

#[derive(Args, Debug)]
pub(crate) struct DeadRedrive {
    /// Message ids (or numbers in the outbox)
    #[arg(value_name = "ID", required = true)]
    pub(crate) ids: Vec<String>,
    /// Who does it, for the audit (default: the user of this session)
    #[arg(long, value_name = "NAME")]
    pub(crate) by: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct DeadCancel {
    /// Message ids (or numbers in the outbox)
    #[arg(value_name = "ID", required = true)]
    pub(crate) ids: Vec<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: String,
    /// Who does it, for the audit (default: the user of this session)
    #[arg(long, value_name = "NAME")]
    pub(crate) by: Option<String>,
}

fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("a header is given as NAME=VALUE".to_owned()),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    postrider_relay::config::parse_duration(text)
        .ok_or_else(|| "a time is given as 200ms, 5s, 10m or 1h30m".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
