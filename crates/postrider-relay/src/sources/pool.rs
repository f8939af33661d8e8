//! A handful of connections to one database, each operation with a deadline of its own.
//!
//! sqlx has a pool too. It pings a connection after each use, without a limit on that ping, and hands on a connection
//! whose `begin()` was cancelled half-way. Here a connection that gave an error, or was dropped in the middle of an
//! operation, is thrown away: nothing half-done is ever reused, and a half-open connection costs one deadline.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::{ConnectOptions, Connection};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

/// What an operation on a connection gives.
pub(super) type Answer<'c, T> = BoxFuture<'c, Result<T, sqlx::Error>>;

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Sqlx(error)
    }
}

/// Why an operation gave nothing.
#[derive(Debug)]
pub(super) enum Failure {
    /// The database, the driver or the network.
    Sqlx(sqlx::Error),
    /// No answer before the deadline; what it asked for may have happened.
    Deadline(Duration),
}

/// Prepares a new connection.
type Session<C> = Box<dyn for<'c> Fn(&'c mut C) -> Answer<'c, ()> + Send + Sync>;

/// Connections to one database, opened when they are needed.
pub(super) struct Pool<C: Connection> {
    options: C::Options,
    session: Session<C>,
    deadline: Duration,
    permits: Semaphore,
    idle: Mutex<Vec<C>>,
}

impl<C: Connection> std::fmt::Debug for Pool<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

impl<C: Connection> Pool<C>
where
    C::Options: ConnectOptions<Connection = C> + Sync,
{
    /// At most `size` connections (at least one), each prepared by `session`; `deadline` counts for a whole operation,
    /// waiting for a connection included.
    pub(super) fn new(
        options: C::Options,
        size: u32,
        deadline: Duration,
        session: impl for<'c> Fn(&'c mut C) -> Answer<'c, ()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            options,
            session: Box::new(session),
            deadline,
            permits: Semaphore::new(size.max(1) as usize),
            idle: Mutex::new(Vec::new()),
        }
    }

    /// Runs `work` on a connection. Only a connection whose work succeeded is used again.
    pub(super) async fn run<T>(
        &self,
        work: impl for<'c> FnOnce(&'c mut C) -> Answer<'c, T> + Send,
    ) -> Result<T, Failure> {
        let until = Instant::now() + self.deadline;
        let bounded = timeout_at(until, async {
            // The semaphore is never closed; if it were, working without a permit would still be right.
            let _permit = self.permits.acquire().await;
            let mut connection = self.connection().await?;
            let answer = work(&mut connection).await?;
            self.idle().push(connection);
            Ok(answer)
        });
        match bounded.await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                if lost(&error) {
                    // The others went to the same server: do not find out one deadline at a time.
                    self.idle().clear();
                }
                Err(Failure::Sqlx(error))
            }
            Err(_) => {
                self.idle().clear();
                Err(Failure::Deadline(self.deadline))
            }
        }
    }

    async fn connection(&self) -> Result<C, sqlx::Error> {
        let idle = self.idle().pop();
        if let Some(connection) = idle {
            return Ok(connection);
        }
        let mut connection = self.options.connect().await?;
        (self.session)(&mut connection).await?;
        Ok(connection)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<C>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// True when the error says that the server or the way to it is gone.
fn lost(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(error) => error
            .code()
            .is_some_and(|code| code.starts_with("57P") || code.starts_with("08") || code == "25P03"),
        _ => false,
    }
}
