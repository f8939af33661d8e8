//! `dead`: dead messages listed, shown, put back, cancelled.

use anyhow::Result;
use postrider_relay::config::Config;
use postrider_relay::inspect::{Admin, Filter, ListState, Selection, Status};
use postrider_relay::message::Position;
use serde_json::{Value, json};

use super::{list, show};
use crate::args::{Dead, DeadCancel, DeadList, DeadRedrive, Global};
use crate::fault::Fault;
use crate::{database, outbox, output};

pub(crate) async fn run(global: &Global, command: &Dead) -> Result<()> {
    match command {
        Dead::List(args) => list(global, args).await,
        Dead::Show(args) => show::dead(global, args).await,
        Dead::Redrive(args) => redrive(global, args).await,
        Dead::Cancel(args) => cancel(global, args).await,
    }
}

async fn list(global: &Global, args: &DeadList) -> Result<()> {
    let (config, admin) = outbox::open(global).await?;
    let filter = Filter { state: ListState::Dead, topic: args.topic.clone(), key: None };
    let (rows, _) = list::newest(&config, admin.as_ref(), &filter, args.limit).await?;
    if global.json {
        let rows: Vec<Value> = rows.iter().map(list::as_json).collect();
        return Ok(output::json(&json!({ "messages": rows }))?);
    }
    if rows.is_empty() {
        return Ok(output::line("no dead messages")?);
    }
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    Ok(output::line(&output::table(
        &["DEAD SINCE", "REASON", "ATTEMPTS", "TOPIC", "MESSAGE ID", "LAST ERROR"],
        &cells,
    ))?)
}

fn cells(row: &Status) -> Vec<String> {
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    vec![
        row.dead_at_us.map_or_else(|| "-".to_owned(), output::time),
        or_dash(&row.dead_reason),
        row.attempts.to_string(),
        row.topic.clone(),
        row.message_id.clone(),
        or_dash(&row.last_error),
    ]
}

async fn redrive(global: &Global, args: &DeadRedrive) -> Result<()> {
    let (config, admin) = outbox::open(global).await?;
    let positions = all_dead(&config, admin.as_ref(), &args.ids).await?;
    let done = admin.redrive(&Selection::Positions(positions), &actor(args.by.as_deref())).await;
    let done = done.map_err(|e| outbox::source(&config, &e))?;
    if global.json {
        return Ok(output::json(&json!({ "redriven": done }))?);
    }
    Ok(output::line(&format!("{done} put back: sent again as soon as a relay takes them"))?)
}

async fn cancel(global: &Global, args: &DeadCancel) -> Result<()> {
    let (config, admin) = outbox::open(global).await?;
    let positions = all_dead(&config, admin.as_ref(), &args.ids).await?;
    let selection = Selection::Positions(positions);
    let done = admin.cancel(&selection, &actor(args.by.as_deref()), Some(&args.reason)).await;
    let done = done.map_err(|e| outbox::source(&config, &e))?;
    if global.json {
        return Ok(output::json(&json!({ "cancelled": done }))?);
    }
    Ok(output::line(&format!("{done} cancelled: they will never be sent"))?)
}

/// The positions of `ids`, all of which must be dead: an action on half of what was named would surprise.
async fn all_dead(config: &Config, admin: &dyn Admin, ids: &[String]) -> Result<Vec<Position>> {
    let mut positions = Vec::with_capacity(ids.len());
    for id in ids {
        let found = outbox::find(config, admin, id, false).await?;
        if found.status.state != "DEAD" {
            return Err(Fault::new(format!(
                "message {id:?} is not dead: its state is {}",
                found.status.state
            ))
            .at(database::place(config))
            .cure("leave it out; nothing was changed")
            .code(3)
            .into());
        }
        positions.push(found.status.position);
    }
    Ok(positions)
}

/// Who acts, for the audit.
fn actor(given: Option<&str>) -> String {
    let of_session = || std::env::var("USER").ok().filter(|user| !user.is_empty());
    given.map(str::to_owned).or_else(of_session).unwrap_or_else(|| "unknown".to_owned())
}
