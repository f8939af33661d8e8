//! `status`: relays, shards, backlog, lag, dead messages, and whether every message is accounted for.

use std::time::Duration;

use anyhow::Result;
use postrider_relay::config::Config;
use postrider_relay::inspect::{Admin, RelayRow, ShardRow};
use postrider_relay::source::{SourceError, Summary};
use serde_json::{Value, json};

use crate::args::Global;
use crate::{database, outbox, output};

/// Counting stops here: then it says "at least".
const CAP: u64 = 100_000;
/// Buckets of 4,096 ids per look for unaccounted messages, and looks: about four million ids in all.
const BUCKETS: u32 = 16;
const LOOKS: u32 = 64;
/// Unaccounted messages that are named.
const NAMED: u32 = 10;

struct Status {
    relays: Vec<RelayRow>,
    shards: Vec<ShardRow>,
    summary: Summary,
    unaccounted: Vec<i64>,
    looked_at: u64,
    complete: bool,
}

pub(crate) async fn run(global: &Global) -> Result<()> {
    let (config, admin) = outbox::open(global).await?;
    let status = look(admin.as_ref()).await.map_err(|e| outbox::source(&config, &e))?;
    if global.json {
        return Ok(output::json(&as_json(&status))?);
    }
    Ok(output::line(&text(&config, &status))?)
}

async fn look(admin: &dyn Admin) -> Result<Status, SourceError> {
    let mut status = Status {
        relays: admin.relays().await?,
        shards: admin.shards().await?,
        summary: admin.summary(CAP).await?,
        unaccounted: Vec::new(),
        looked_at: 0,
        complete: false,
    };
    let mut bucket = 0;
    for _ in 0..LOOKS {
        let found = admin.unaccounted(bucket, BUCKETS, NAMED).await?;
        status.unaccounted.extend(found.unaccounted.iter().map(|p| p.0));
        status.looked_at += found.looked_at;
        bucket = found.next_bucket;
        if bucket == 0 {
            status.complete = true;
            break;
        }
    }
    Ok(status)
}

fn text(config: &Config, status: &Status) -> String {
    let s = &status.summary;
    let orphaned = status.shards.iter().filter(|shard| shard.owner.is_none()).count();
    let looked = match status.complete {
        true => format!("{} of {} messages", status.unaccounted.len(), status.looked_at),
        false => format!("{} of the first {} messages", status.unaccounted.len(), status.looked_at),
    };
    let mut lines = vec![
        format!("Outbox       {}", database::place(config)),
        format!("Backlog      {} ready, {} waiting", count(s.ready), count(s.waiting)),
        format!("Lag          {}", lag(s.lag)),
        format!("Dead         {}", count(s.dead)),
        format!("Sent         {} in the last 5 minutes", s.sent_5m),
        format!("Unaccounted  {looked}"),
        format!("Shards       {} of {} have no owner", orphaned, status.shards.len()),
    ];
    let named: Vec<String> = status.unaccounted.iter().take(10).map(ToString::to_string).collect();
    if !named.is_empty() {
        lines.push(format!("             positions {}: no table knows them, so nobody sends them; the manual, operations.md, says how to mend it", named.join(", ")));
    }
    lines.push(String::new());
    if status.relays.is_empty() {
        lines.push("No relay is running: start one with `postrider run`.".to_owned());
    } else {
        let rows: Vec<Vec<String>> = status.relays.iter().map(relay_cells).collect();
        lines.push(output::table(
            &["RELAY", "VERSION", "SHARDS", "STARTED", "LEASE", "IN FLIGHT", "HELD KEYS"],
            &rows,
        ));
        lines.extend(status.relays.iter().flat_map(troubles));
    }
    lines.join("\n")
}

fn relay_cells(relay: &RelayRow) -> Vec<String> {
    let state = state(relay);
    let number = |name: &str| {
        state.get(name).and_then(Value::as_u64).map_or_else(|| "-".to_owned(), |n| n.to_string())
    };
    let lease = Duration::from_micros(relay.expires_in_us.unsigned_abs());
    let lease = output::span(lease);
    vec![
        relay.instance.clone(),
        relay.version.clone(),
        relay.shards.to_string(),
        output::time(relay.started_at_us),
        if relay.is_live() { format!("{lease} left") } else { format!("ended {lease} ago") },
        number("in_flight"),
        number("held_keys"),
    ]
}

/// What the relay reported of itself; an empty object when it is unreadable.
fn state(relay: &RelayRow) -> Value {
    serde_json::from_str(&relay.state).unwrap_or_else(|_| json!({}))
}

/// What stands in the way of a relay, a line each.
fn troubles(relay: &RelayRow) -> Vec<String> {
    let state = state(relay);
    let text = |value: &Value, name: &str| value.get(name).and_then(Value::as_str).map(output::printable);
    let breakers = state.get("breakers").and_then(Value::as_array).cloned().unwrap_or_default();
    let mut lines: Vec<String> = breakers
        .iter()
        .map(|b| {
            let sink = text(b, "sink").unwrap_or_else(|| "?".to_owned());
            let destination =
                text(b, "destination").map_or_else(String::new, |d| format!(", destination {d}"));
            let since = b.get("open_for_seconds").and_then(Value::as_u64).unwrap_or_default();
            let operator = match b.get("needs_operator").and_then(Value::as_bool) {
                Some(true) => " (an operator is needed)",
                _ => "",
            };
            let reason = text(b, "reason").unwrap_or_else(|| "unknown".to_owned());
            let since = output::span(Duration::from_secs(since));
            format!(
                "Breaker open  {}: sink {sink}{destination}, for {since}{operator}: {reason}",
                relay.instance
            )
        })
        .collect();
    if let Some(error) = text(&state, "last_error") {
        lines.push(format!("Last error    {}: {error}", relay.instance));
    }
    lines
}

fn count(n: u64) -> String {
    if n >= CAP { format!("at least {n}") } else { n.to_string() }
}

fn lag(lag: Option<Duration>) -> String {
    lag.map_or_else(
        || "none: nothing waits to be sent".to_owned(),
        |l| format!("{}: age of the oldest that waits", output::span(l)),
    )
}

fn as_json(status: &Status) -> Value {
    let s = &status.summary;
    let relays: Vec<Value> = status
        .relays
        .iter()
        .map(|r| {
            json!({
                "relay": format!("{:016x}", r.relay),
                "instance": r.instance,
                "version": r.version,
                "live": r.is_live(),
                "shards": r.shards,
                "started_at": output::rfc3339(r.started_at_us),
                "heartbeat_at": output::rfc3339(r.heartbeat_at_us),
                "lease_left_ms": r.expires_in_us / 1_000,
                "state": state(r),
            })
        })
        .collect();
    json!({
        "ready": s.ready,
        "waiting": s.waiting,
        "dead": s.dead,
        "counts_stop_at": CAP,
        "lag_ms": s.lag.map(|l| u64::try_from(l.as_millis()).unwrap_or(u64::MAX)),
        "sent_5m": s.sent_5m,
        "unaccounted": status.unaccounted.len(),
        "unaccounted_positions": status.unaccounted,
        "looked_at": status.looked_at,
        "looked_at_all": status.complete,
        "shards": status.shards.len(),
        "shards_without_owner": status.shards.iter().filter(|shard| shard.owner.is_none()).count(),
        "relays": relays,
    })
}
