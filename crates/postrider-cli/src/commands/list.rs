//! `list`: messages, newest first.

use anyhow::Result;
use postrider_relay::config::Config;
use postrider_relay::inspect::{Admin, Filter, ListState, Order, Page, Status};
use serde_json::{Value, json};

use crate::args::{Global, List, State};
use crate::{outbox, output};

/// Pages of sent messages that are looked through for a filter before the command says so and stops.
const PAGES: usize = 50;

pub(crate) async fn run(global: &Global, args: &List) -> Result<()> {
    let (config, admin) = outbox::open(global).await?;
    let states: &[ListState] = match args.state {
        None => &[ListState::Pending, ListState::Dead, ListState::Cancelled, ListState::Sent],
        Some(State::Pending) => &[ListState::Pending],
        Some(State::Waiting) => &[ListState::Waiting],
        Some(State::Dead) => &[ListState::Dead],
        Some(State::Cancelled) => &[ListState::Cancelled],
        Some(State::Sent) => &[ListState::Sent],
    };
    let mut rows = Vec::new();
    let mut complete = true;
    for state in states {
        let filter = Filter { state: *state, topic: args.topic.clone(), key: args.key.clone() };
        let (found, all) = newest(&config, admin.as_ref(), &filter, args.limit).await?;
        rows.extend(found);
        complete &= all;
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.position));
    rows.truncate(usize::try_from(args.limit)?);
    if !complete && rows.len() < usize::try_from(args.limit)? {
        eprintln!(
            "note: older sent messages were not looked through; narrow the filter, or use `postrider show ID`"
        );
    }
    show(global, &rows)
}

/// Up to `limit` messages, and whether everything was looked through as far as needed.
pub(crate) async fn newest(
    config: &Config,
    admin: &dyn Admin,
    filter: &Filter,
    limit: u32,
) -> Result<(Vec<Status>, bool)> {
    let mut rows: Vec<Status> = Vec::new();
    let mut after = None;
    for _ in 0..PAGES {
        let missing = limit.saturating_sub(u32::try_from(rows.len())?);
        if missing == 0 {
            return Ok((rows, true));
        }
        let page = Page { order: Order::Newest, after, limit: missing };
        let listing = admin.list(filter, page).await.map_err(|e| outbox::source(config, &e))?;
        rows.extend(listing.rows);
        after = listing.next;
        if after.is_none() {
            return Ok((rows, true));
        }
    }
    Ok((rows, false))
}

fn show(global: &Global, rows: &[Status]) -> Result<()> {
    if global.json {
        let rows: Vec<Value> = rows.iter().map(as_json).collect();
        return Ok(output::json(&json!({ "messages": rows }))?);
    }
    if rows.is_empty() {
        return Ok(output::line("no messages")?);
    }
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            vec![
                row.position.to_string(),
                row.state.clone(),
                output::time(row.created_at_us),
                row.topic.clone(),
                row.key.clone().unwrap_or_else(|| "-".to_owned()),
                row.attempts.to_string(),
                row.message_id.clone(),
            ]
        })
        .collect();
    Ok(output::line(&output::table(
        &["POSITION", "STATE", "CREATED", "TOPIC", "KEY", "ATTEMPTS", "MESSAGE ID"],
        &cells,
    ))?)
}

/// One message as JSON; fields that say nothing are null.
pub(crate) fn as_json(row: &Status) -> Value {
    let time = |us: Option<i64>| us.map(output::rfc3339);
    json!({
        "position": row.position.0,
        "message_id": row.message_id,
        "topic": row.topic,
        "key": row.key,
        "aggregate_type": row.aggregate_type,
        "aggregate_id": row.aggregate_id,
        "event_type": row.event_type,
        "state": row.state,
        "created_at": output::rfc3339(row.created_at_us),
        "attempts": row.attempts,
        "tries": row.tries,
        "due_at": time(row.due_at_us),
        "last_error": row.last_error,
        "sent_at": time(row.sent_at_us),
        "sink": row.sink,
        "evidence": row.evidence,
        "dead_at": time(row.dead_at_us),
        "dead_reason": row.dead_reason,
        "cancelled_at": time(row.cancelled_at_us),
        "cancelled_by": row.cancelled_by,
        "cancel_reason": row.cancel_reason,
    })
}
