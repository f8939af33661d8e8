//! The library on real databases. Needs `POSTGRES_URL` (a superuser's), `psql` and `sqlite3`.

mod batch;
mod bytes;
mod common;
mod enqueue;
mod grants;
mod inbox;
mod limits;
mod plain_sql;
mod pool;
mod route;
mod schema;
