//! `show`: what happened to one message, in the order of time.

use anyhow::Result;
use postrider_relay::inspect::Shown;
use postrider_relay::message::Payload;
use serde_json::{Value, json};

use super::list;
use crate::args::{Global, Show};
use crate::fault::Fault;
use crate::{database, outbox, output};

pub(crate) async fn run(global: &Global, args: &Show) -> Result<()> {
    let (config, admin) = outbox::open(global).await?;
    let shown = outbox::find(&config, admin.as_ref(), &args.id, args.payload).await?;
    print(global, &shown)
}

/// As `show`, but only for a dead message.
pub(crate) async fn dead(global: &Global, args: &Show) -> Result<()> {
    let (config, admin) = outbox::open(global).await?;
    let shown = outbox::find(&config, admin.as_ref(), &args.id, args.payload).await?;
    if shown.status.state != "DEAD" {
        return Err(Fault::new(format!(
            "message {:?} is not dead: its state is {}",
            args.id, shown.status.state
        ))
        .at(database::place(&config))
        .cure("`postrider show` shows messages of every state")
        .code(3)
        .into());
    }
    print(global, &shown)
}

fn print(global: &Global, shown: &Shown) -> Result<()> {
    if global.json {
        return Ok(output::json(&as_json(shown))?);
    }
    let mut text = facts(shown);
    text.push_str("\n\n");
    text.push_str(&timeline(shown));
    if let Some(payload) = &shown.payload {
        text.push_str("\n\nPayload\n");
        text.push_str(&match payload {
            Payload::Absent => "(none)".to_owned(),
            Payload::Text(bytes) => lines_printable(&String::from_utf8_lossy(bytes)),
            Payload::Binary(bytes) => hex(bytes),
        });
    }
    Ok(output::line(&text)?)
}

fn facts(shown: &Shown) -> String {
    let s = &shown.status;
    let mut facts = vec![
        ("Message", s.message_id.clone()),
        ("State", s.state.clone()),
        ("Position", s.position.to_string()),
        ("Topic", s.topic.clone()),
        ("Key", s.key.clone().unwrap_or_else(|| "none: not kept in order".to_owned())),
    ];
    if let Some(kind) = &s.event_type {
        facts.push(("Event", kind.clone()));
    }
    for (name, value) in &shown.headers {
        facts.push(("Header", format!("{name}: {value}")));
    }
    let size = match shown.payload_bytes {
        None => "none".to_owned(),
        Some(bytes) => {
            let kind = shown.content_type.as_deref().unwrap_or("no content type");
            format!(
                "{bytes} bytes, {kind}{}",
                if shown.payload.is_some() { "" } else { " (shown with --payload)" }
            )
        }
    };
    facts.push(("Payload", size));
    let limit = shown.max_attempts.map_or_else(String::new, |n| format!(" of {n}"));
    facts.push(("Attempts", format!("{}{limit}", s.attempts)));
    if let Some(tries) = s.tries {
        facts.push(("Tries", tries.to_string()));
    }
    if shown.holds_key {
        facts.push(("Holds", "the later messages of its key wait for it".to_owned()));
    }
    facts
        .iter()
        .map(|(name, value)| format!("{name:<9} {}", output::printable(value)))
        .collect::<Vec<_>>()
        .join("\n")
}

/// What happened, oldest first, then what comes next.
fn timeline(shown: &Shown) -> String {
    let s = &shown.status;
    let mut events = vec![(s.created_at_us, "committed into the outbox (time of the INSERT)".to_owned())];
    for receipt in &shown.receipts {
        let evidence =
            receipt.evidence.as_deref().map_or_else(String::new, |e| format!(", it answered: {e}"));
        events.push((receipt.sent_at_us, format!("acknowledged by the sink {}{evidence}", receipt.sink)));
    }
    if let Some(at) = s.dead_at_us {
        let reason = s.dead_reason.as_deref().unwrap_or("unknown");
        let error = s.last_error.as_deref().map_or_else(String::new, |e| format!(": {e}"));
        events.push((at, format!("given up ({reason}){error}")));
    }
    for entry in &shown.audit {
        let detail = entry.detail.as_deref().map_or_else(String::new, |d| format!(": {d}"));
        events.push((entry.at_us, format!("{} by {}{detail}", entry.action, entry.actor)));
    }
    events.sort_by_key(|(at, _)| *at);
    let mut lines: Vec<String> = events
        .iter()
        .map(|(at, what)| format!("{}  {}", output::time(*at), output::printable(what)))
        .collect();
    if s.state == "PENDING" {
        lines.push(next(shown));
    } else if s.state == "UNACCOUNTED" {
        lines.push(format!(
            "{:<24}  in no small table and in no receipt: nobody will send it. The manual, operations, says how to queue it again",
            "now"
        ));
    }
    format!("Timeline\n{}", lines.join("\n"))
}

fn next(shown: &Shown) -> String {
    let s = &shown.status;
    match (s.due_at_us, s.attempts) {
        (None, _) if s.key.is_some() => {
            format!(
                "{:<24}  next: sent as soon as a relay takes it, after the earlier ones of its key",
                "now"
            )
        }
        (None, _) => format!("{:<24}  next: sent as soon as a relay takes it", "now"),
        (Some(due), 0) => {
            format!("{}  next: due (delayed by its producer, or its sink did not take it)", output::time(due))
        }
        (Some(due), n) => {
            let error = s.last_error.as_deref().unwrap_or("unknown");
            format!(
                "{}  next: try again; attempt {n} failed: {}",
                output::time(due),
                output::printable(error)
            )
        }
    }
}

fn lines_printable(text: &str) -> String {
    text.lines().map(output::printable).collect::<Vec<_>>().join("\n")
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .chunks(32)
        .map(|row| row.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" "))
        .collect::<Vec<_>>()
        .join("\n")
}

fn as_json(shown: &Shown) -> Value {
    let mut value = list::as_json(&shown.status);
    let headers: serde_json::Map<String, Value> =
        shown.headers.iter().map(|(n, v)| (n.clone(), Value::from(v.as_str()))).collect();
    let receipts: Vec<Value> = shown
        .receipts
        .iter()
        .map(|r| {
            let at = output::rfc3339(r.sent_at_us);
            json!({ "sent_at": at, "sink": r.sink, "relay": format!("{:016x}", r.relay), "evidence": r.evidence })
        })
        .collect();
    let audit: Vec<Value> = shown
        .audit
        .iter()
        .map(|a| json!({ "at": output::rfc3339(a.at_us), "actor": a.actor, "action": a.action, "detail": a.detail }))
        .collect();
    let more = json!({
        "tag": shown.tag,
        "schema_version": shown.schema_version,
        "headers": headers,
        "content_type": shown.content_type,
        "payload_bytes": shown.payload_bytes,
        "max_attempts": shown.max_attempts,
        "traceparent": shown.trace,
        "tracestate": shown.trace_state,
        "holds_key": shown.holds_key,
        "receipts": receipts,
        "audit": audit,
    });
    if let (Value::Object(all), Value::Object(more)) = (&mut value, more) {
        all.extend(more);
        let payload = match &shown.payload {
            None => None,
            Some(Payload::Absent) => Some(("payload", Value::Null)),
            Some(Payload::Text(bytes)) => Some(("payload", Value::from(String::from_utf8_lossy(bytes)))),
            Some(Payload::Binary(bytes)) => Some(("payload_hex", Value::from(hex_plain(bytes)))),
        };
        all.extend(payload.map(|(name, value)| (name.to_owned(), value)));
    }
    value
}

fn hex_plain(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
