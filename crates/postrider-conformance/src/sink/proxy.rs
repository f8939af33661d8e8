//! A TCP proxy between a sink and its broker that can freeze and thaw.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// Passes bytes between clients and one server. While frozen it takes nothing from the clients and closes nothing, as a
/// network that has stopped: what they send piles up.
#[derive(Debug)]
pub struct Proxy {
    address: String,
    frozen: Arc<watch::Sender<bool>>,
    cut: Arc<watch::Sender<u64>>,
    connections: Arc<AtomicUsize>,
    _task: AbortOnDropHandle<()>,
}

impl Proxy {
    /// Listens on a loopback port and passes everything to `server`.
    ///
    /// # Panics
    /// When no port is free.
    pub async fn start(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let frozen = Arc::new(watch::Sender::new(false));
        let connections = Arc::new(AtomicUsize::new(0));
        let cut = Arc::new(watch::Sender::new(0));
        let (server, gate, count) = (server.to_owned(), Arc::clone(&frozen), Arc::clone(&connections));
        let cuts = Arc::clone(&cut);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (server, gate, count, mut cut) =
                    (server.clone(), gate.subscribe(), Arc::clone(&count), cuts.subscribe());
                tokio::spawn(async move {
                    tokio::select! {
                        () = pass(client, server, gate, count) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Self { address, frozen, cut, connections, _task: AbortOnDropHandle::new(task) }
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connections passed through so far, not counting those that found no server.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Ends every connection at once; new ones pass.
    pub fn cut(&self) {
        self.cut.send_modify(|cuts| *cuts += 1);
    }

    /// Takes nothing more from the clients.
    pub fn freeze(&self) {
        self.frozen.send_replace(true);
    }

    /// Goes on, with everything that has piled up.
    pub fn thaw(&self) {
        self.frozen.send_replace(false);
    }
}

async fn pass(
    client: TcpStream,
    server: String,
    mut frozen: watch::Receiver<bool>,
    connections: Arc<AtomicUsize>,
) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    connections.fetch_add(1, Ordering::SeqCst);
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let up = async {
        let mut buffer = vec![0; 16 << 10];
        loop {
            let read = from_client.read(&mut buffer).await.unwrap_or(0);
            if read == 0 || frozen.wait_for(|frozen| !frozen).await.is_err() {
                return;
            }
            if to_server.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    };
    let down = async { tokio::io::copy(&mut from_server, &mut to_client).await.unwrap_or(0) };
    // A client that has gone still gets its last bytes to the server, as the system's own buffers would.
    tokio::join!(up, down);
}
