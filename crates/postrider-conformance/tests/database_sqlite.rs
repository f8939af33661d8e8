//! The database suite on SQLite.

postrider_conformance::database_suite!(postrider_conformance::database::sqlite::Sqlite);
