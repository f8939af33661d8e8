//! `init`: creates or migrates the tables, or prints the SQL for it.

use anyhow::Result;
use postrider::schema;
use serde_json::json;

use crate::args::{Global, Init};
use crate::database::{self, Connection};
use crate::{output, setup};

pub(crate) async fn run(global: &Global, args: &Init) -> Result<()> {
    let config = setup::configuration(global)?;
    let dialect = database::dialect(&config)?;
    if args.print || args.grants {
        let sql = if args.print { schema::sql(dialect) } else { schema::grants(dialect).to_owned() };
        if global.json {
            return Ok(output::json(&json!({ "sql": sql }))?);
        }
        return Ok(output::line(sql.trim_end())?);
    }
    let mut connection = database::connect(&config, true).await?;
    let done = match &mut connection {
        Connection::Postgres(c) => schema::migrate(c).await,
        Connection::Sqlite(c) => schema::migrate(c).await,
    };
    let done = done.map_err(|e| database::schema(&config, &e))?;
    connection.close().await?;
    if global.json {
        return Ok(output::json(
            &json!({ "from": done.from, "to": done.to, "changed": done.from != done.to }),
        )?);
    }
    let place = database::place(&config);
    Ok(output::line(&match (done.from, done.to) {
        (0, to) => format!("tables created, version {to}: {place}"),
        (from, to) if from == to => format!("tables are up to date, version {to}: {place}"),
        (from, to) => format!("tables brought from version {from} to {to}: {place}"),
    })?)
}
