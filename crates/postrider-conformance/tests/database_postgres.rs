//! The database suite on PostgreSQL.

postrider_conformance::database_suite!(postrider_conformance::database::postgres::Postgres);
