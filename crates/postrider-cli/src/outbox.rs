//! Opening the outbox for looking and for operators' actions, and what its errors mean.

use std::sync::Arc;

use anyhow::Result;
use postrider_relay::config::{Config, Origin};
use postrider_relay::inspect::{Admin, Shown, Which};
use postrider_relay::message::Position;
use postrider_relay::source::SourceError;
use postrider_relay::sources;
use secrecy::ExposeSecret;

use crate::args::Global;
use crate::fault::Fault;
use crate::{database, setup};

/// The configuration and the outbox it names.
pub(crate) async fn open(global: &Global) -> Result<(Config, Arc<dyn Admin>)> {
    let config = setup::configuration(global)?;
    database::dialect(&config)?;
    let admin =
        sources::admin(config.source.database.expose_secret()).await.map_err(|e| source(&config, &e))?;
    Ok((config, admin))
}

/// An error of the source, with the place it is about. Its text says what to mend.
pub(crate) fn source(config: &Config, error: &SourceError) -> Fault {
    let fault = |text: &str| Fault::from_text(text).at(database::place(config));
    match error {
        SourceError::Operator(text) if config.source.from == Origin::Default => {
            fault(text).cure("name the database with --database, or start with `postrider init` or `postrider run` in this folder")
        }
        SourceError::Operator(text) => fault(text),
        SourceError::Temporary(text) => {
            let fault = fault(text);
            if fault.has_cure() { fault } else { fault.cure("check host and port, and that the server runs; then try again") }
        }
    }
}

/// The message that `id` names: by its message id, or else by its number in the outbox.
pub(crate) async fn find(config: &Config, admin: &dyn Admin, id: &str, payload: bool) -> Result<Shown> {
    let failed = |e: SourceError| source(config, &e);
    if let Some(shown) = admin.show(&Which::MessageId(id.to_owned()), payload).await.map_err(failed)? {
        return Ok(shown);
    }
    if let Ok(number) = id.parse::<i64>()
        && let Some(shown) = admin.show(&Which::Position(Position(number)), payload).await.map_err(failed)?
    {
        return Ok(shown);
    }
    Err(Fault::no_message(id).at(database::place(config)).into())
}
