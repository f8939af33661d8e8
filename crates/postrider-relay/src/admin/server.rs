//! The HTTP server: three pages, nothing that changes anything.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{AdminError, Metrics, metrics};
use crate::engine::RelayHandle;

/// Longest wait for requests that run: a client that never finishes its own must not keep a stopped relay alive.
const STOP_LIMIT: Duration = Duration::from_secs(2);

#[derive(Clone)]
struct Pages {
    relay: RelayHandle,
    source: Arc<str>,
    metrics: Metrics,
}

/// A running server.
#[derive(Debug)]
pub struct AdminServer {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl AdminServer {
    /// The address it listens on, with the real port when port 0 was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more requests and waits for those that run, for a few seconds at most.
    pub async fn stop(mut self) {
        self.stop.cancel();
        match tokio::time::timeout(STOP_LIMIT, &mut self.task).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => tracing::warn!("the server of health and metrics ended by a panic"),
            Err(_) => {
                tracing::debug!("a client did not finish its request; the server ends without it");
                self.task.abort();
            }
        }
    }
}

/// Offers health and metrics of the relay that reads `source` on `address`, which must be a loopback address; port 0 takes
/// any free port.
///
/// # Errors
/// When the address is not loopback, or its port cannot be opened.
pub async fn serve(
    address: SocketAddr,
    source: Arc<str>,
    relay: RelayHandle,
    metrics: Metrics,
) -> Result<AdminServer, AdminError> {
    if !address.ip().is_loopback() {
        return Err(AdminError::NotLoopback(address));
    }
    let bind = |source| AdminError::Bind { address, source };
    let listener = TcpListener::bind(address).await.map_err(bind)?;
    let address = listener.local_addr().map_err(bind)?;
    let stop = CancellationToken::new();
    let upkeep = metrics.clone();
    let router = router(Pages { relay, source, metrics });
    let stopped = stop.clone().cancelled_owned();
    let task = tokio::spawn(async move {
        let serving = axum::serve(listener, router).with_graceful_shutdown(stopped);
        tokio::select! {
            served = serving => if let Err(error) = served {
                tracing::error!(%error, "health and metrics are no longer served");
            },
            () = keep_up(&upkeep) => {}
        }
    });
    Ok(AdminServer { address, stop, task })
}

/// Frees what histograms gather between scrapes. Never returns.
async fn keep_up(metrics: &Metrics) {
    loop {
        tokio::time::sleep(metrics::UPKEEP_EVERY).await;
        metrics.upkeep();
    }
}

fn router(pages: Pages) -> Router {
    Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(text))
        .layer(middleware::from_fn(only_local_names))
        .with_state(pages)
}

async fn livez(State(pages): State<Pages>) -> Response {
    let health = pages.relay.health();
    answer(health.live, &serde_json::json!({ "live": health.live, "reasons": health.reasons }))
}

async fn readyz(State(pages): State<Pages>) -> Response {
    let health = pages.relay.health();
    answer(health.ready, &serde_json::json!({ "ready": health.ready, "reasons": health.reasons }))
}

async fn text(State(pages): State<Pages>) -> Response {
    metrics::record_now(&pages.source, &pages.relay);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], pages.metrics.render())
        .into_response()
}

fn answer(well: bool, body: &serde_json::Value) -> Response {
    let status = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, [(header::CONTENT_TYPE, "application/json")], format!("{body}\n")).into_response()
}

/// A web page that a browser on this machine has open could reach this port under a name of its own choosing (DNS
/// rebinding). Only addresses and `localhost` are answered.
async fn only_local_names(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    let name = host
        .rsplit_once(':')
        .map_or(host, |(name, port)| if port.chars().all(|c| c.is_ascii_digit()) { name } else { host });
    let plain = name.trim_start_matches('[').trim_end_matches(']');
    if plain.is_empty()
        || plain == "localhost"
        || plain.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    {
        return next.run(request).await;
    }
    (StatusCode::MISDIRECTED_REQUEST, "only requests to 127.0.0.1, [::1] or localhost are answered\n")
        .into_response()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[tokio::test]
    async fn a_client_that_never_finishes_its_request_does_not_keep_the_server_from_stopping() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let task = tokio::spawn(async move {
            axum::serve(listener, Router::new()).with_graceful_shutdown(stopped).await.unwrap();
        });
        let mut client = std::net::TcpStream::connect(address).unwrap();
        client.write_all(b"GET /livez HTTP/1.1\r\n").unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let server = AdminServer { address, stop, task };
        tokio::time::timeout(Duration::from_secs(10), server.stop()).await.expect("it stops");
    }
}
