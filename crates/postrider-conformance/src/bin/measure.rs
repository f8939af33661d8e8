//! Prints what the relay costs, at any size. Run it through `scripts/measure`, which starts the servers.

use std::collections::BTreeMap;
use std::time::Duration;

use postrider_conformance::measure::{blocked, idle, pages, rates, settle};
use postrider_conformance::testbed::{History, TestDatabase};
use postrider_relay::core::settings::Settings;

const USAGE: &str = "\
measure pages    [--sent N] [--waiting N] [--dead N] [--flow N] [--database NAME]   pages per read, long life
measure settle   [--messages N] [--keys N] [--batch N]                              draining a backlog
measure blocked  [--others N] [--behind N]                                          one failing key
measure down     [--others N] [--behind N]                                          one of two sinks is down
measure idle     [--seconds N]                                                      nothing to do, single messages
measure rates    [--messages N] [--keys N] [--rounds N]                             null, memory, NATS as ratios

With --database NAME the tables are kept there, and used again when they exist.";

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let options = Options::parse(args)?;
    match command.as_str() {
        "pages" => pages(&options).await?,
        "settle" => settle(&options).await?,
        "blocked" => {
            let (others, behind) = (options.number("others", 20_000)?, options.number("behind", 100_000)?);
            println!("{}", blocked::failing_key(others, behind, Settings::default()).await);
        }
        "down" => {
            let (others, behind) = (options.number("others", 20_000)?, options.number("behind", 100_000)?);
            println!("{}", blocked::sink_down(others, behind, Settings::default()).await);
        }
        "idle" => {
            let watch = Duration::from_secs(options.number("seconds", 20)?);
            println!("{}", idle::idle(watch, Duration::from_millis(10)).await);
        }
        "rates" => {
            let (messages, keys) = (options.number("messages", 30_000)?, options.number("keys", 2_000)?);
            let rounds = usize::try_from(options.number("rounds", 3)?)?;
            println!("{}", rates::rates(messages, keys, rounds).await);
        }
        _ => anyhow::bail!("{USAGE}"),
    }
    Ok(())
}

async fn settle(options: &Options) -> anyhow::Result<()> {
    let (messages, keys) = (options.number("messages", 50_000)?, options.number("keys", 500)?);
    let mut settings = Settings::default();
    println!("default settings: {}", settle::drain(messages, keys, settings.clone()).await);
    settings.settle_batch = u32::try_from(options.number("batch", 500)?)?;
    let batch = settings.settle_batch;
    println!("at most {batch} per settle: {}", settle::drain(messages, keys, settings).await);
    Ok(())
}

async fn pages(options: &Options) -> anyhow::Result<()> {
    let history = History {
        sent: options.number("sent", 10_000_000)?.cast_signed(),
        waiting: options.number("waiting", 1_000_000)?.cast_signed(),
        dead: options.number("dead", 1_000_000)?.cast_signed(),
    };
    let flow = options.number("flow", 1_000_000)?.cast_signed();
    let db = match options.text("database") {
        Some(name) => TestDatabase::kept_or_new(name).await,
        None => TestDatabase::new().await,
    };
    if db.count("select count(*) from (select from outbox limit 1) o").await == 0 {
        db.live_through(history).await;
    }
    let mut p = pages::Pages::new(&db).await;
    println!("{}", pages::COLUMNS);
    let mut told = 0;
    let mut tell = |p: &pages::Pages<'_>| {
        p.stages()[told..].iter().for_each(|stage| println!("{stage}"));
        told = p.stages().len();
    };
    p.statistics(20_000.min(flow)).await;
    tell(&p);
    p.old_snapshot(flow).await;
    tell(&p);
    p.open_writer(flow).await;
    tell(&p);
    let loaded = p.stages().iter().find(|s| s.name.starts_with("open writer: loaded"));
    println!("\nlate windows while the writer is open\n{:>10} {:>8} {:>9}", "ids", "pages", "ms");
    let windows = loaded.map(pages::Stage::windows).unwrap_or_default();
    for w in windows.iter().step_by((windows.len() / 12).max(1)).chain(windows.last()) {
        println!("{:>10} {:>8} {:>9.2}", w.ids, w.pages, w.took.as_secs_f64() * 1e3);
    }
    Ok(())
}

/// `--name value` pairs.
struct Options(BTreeMap<String, String>);

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let mut options = BTreeMap::new();
        while let Some(name) = args.next() {
            let Some((name, value)) = name.strip_prefix("--").zip(args.next()) else {
                anyhow::bail!("`{name}` is no option with a value\n{USAGE}");
            };
            options.insert(name.to_owned(), value);
        }
        Ok(Self(options))
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn number(&self, name: &str, default: u64) -> anyhow::Result<u64> {
        match self.text(name) {
            None => Ok(default),
            Some(text) => {
                text.parse().map_err(|_| anyhow::anyhow!("--{name} must be a number, not `{text}`\n{USAGE}"))
            }
        }
    }
}
