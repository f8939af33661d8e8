//! `send`: one message in a transaction of its own.

use std::io::Read;

use anyhow::{Context, Result};
use postrider::{EnqueueError, Enqueued, Message, MessageError, Payload, schema};
use postrider_relay::config::Config;
use serde_json::json;
use sqlx::Connection as _;

use crate::args::{Global, Send};
use crate::database::{self, Connection};
use crate::fault::Fault;
use crate::{output, setup};

pub(crate) async fn run(global: &Global, args: &Send) -> Result<()> {
    let config = setup::configuration(global)?;
    let message = message(args)?;
    let mut connection = database::connect(&config, true).await?;
    if let Connection::Sqlite(c) = &mut connection {
        schema::migrate(c).await.map_err(|e| database::schema(&config, &e))?;
    }
    let sent = match &mut connection {
        Connection::Postgres(c) => {
            let mut tx = c.begin().await?;
            let sent = postrider::enqueue(&mut tx, &message).await.map_err(|e| refused(&config, &e))?;
            tx.commit().await.context("the transaction was not committed")?;
            sent
        }
        Connection::Sqlite(c) => {
            let mut tx = c.begin_with("BEGIN IMMEDIATE").await?;
            let sent = postrider::enqueue(&mut tx, &message).await.map_err(|e| refused(&config, &e))?;
            tx.commit().await.context("the transaction was not committed")?;
            sent
        }
    };
    connection.close().await?;
    tell(global, &sent)
}

fn tell(global: &Global, sent: &Enqueued) -> Result<()> {
    if global.json {
        return Ok(output::json(&json!({ "message_id": sent.message_id, "already": sent.already }))?);
    }
    Ok(output::line(&match sent.already {
        false => format!("message {} is in the outbox", sent.message_id),
        true => format!("message {} was in the outbox already, with the same content", sent.message_id),
    })?)
}

fn message(args: &Send) -> Result<Message> {
    let mut message = Message::new(args.topic.as_str(), payload(args)?);
    if let Some(id) = &args.id {
        message = message.id(id.as_str());
    }
    if let Some(key) = &args.key {
        message = message.key(key.as_str());
    }
    if let Some(event_type) = &args.event_type {
        message = message.event_type(event_type.as_str());
    }
    if let Some(content_type) = &args.content_type {
        message = message.content_type(content_type.as_str());
    }
    if let Some(delay) = args.delay {
        message = message.delay(delay);
    }
    for (name, value) in &args.header {
        message = message.header(name.as_str(), value.as_str());
    }
    Ok(message)
}

/// The payload of the argument, the file or standard input: JSON when it is a JSON object or array, text, or bytes.
fn payload(args: &Send) -> Result<Payload> {
    let bytes = match (&args.payload, &args.file) {
        (None, None) => return Ok(Payload::Absent),
        (Some(text), _) if text != "-" => text.clone().into_bytes(),
        (Some(_), _) => {
            let mut bytes = Vec::new();
            std::io::stdin()
                .read_to_end(&mut bytes)
                .map_err(|e| Fault::new(format!("standard input cannot be read: {e}")).at("the payload"))?;
            bytes
        }
        (None, Some(path)) => std::fs::read(path).map_err(|e| {
            Fault::new(format!("the payload cannot be read: {e}"))
                .at(path.display())
                .cure("name a readable file")
        })?,
    };
    if args.bytes {
        return Ok(Payload::Bytes(bytes));
    }
    let text = String::from_utf8(bytes).map_err(|_| {
        Fault::new("the payload is not UTF-8 text").at("the payload").cure("add --bytes to send it as it is")
    })?;
    let json = text.trim_start().starts_with(['{', '['])
        && serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
    Ok(if json { Payload::Json(text) } else { Payload::Text(text) })
}

fn refused(config: &Config, error: &EnqueueError) -> Fault {
    let place = database::place(config);
    match error {
        EnqueueError::Message(why) => {
            let fault =
                Fault::new(format!("the message is refused: {why}")).at("the message on the command line");
            match why {
                MessageError::TooLong { field: "payload", .. } => fault.cure(
                    "store the large part elsewhere and send its address: brokers refuse large messages, or take them badly",
                ),
                _ => fault.cure("change the field that is named; nothing was written"),
            }
        }
        EnqueueError::DifferentContent { message_id } => {
            Fault::new(format!("the id {message_id:?} is taken by a message with other content"))
                .at(place)
                .cure("give this message another id, or repeat the first one unchanged")
        }
        EnqueueError::SchemaMissing(_) => database::schema(config, &schema::SchemaError::Missing),
        EnqueueError::Denied(e) => Fault::new(format!(
            "the database does not allow the user to write messages: {e}"
        ))
        .at(place)
        .cure(
            "run the output of `postrider init --grants`, and make the user a member of postrider_producer",
        ),
        EnqueueError::Retryable(e) => Fault::new(format!("the database was too busy: {e}"))
            .at(place)
            .cure("send it again; nothing was written"),
        other => Fault::new(other.to_string()).at(place),
    }
}
