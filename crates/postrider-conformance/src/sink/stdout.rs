//! The rig of the stdout sink: a writer that remembers.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postrider_relay::sink::Sink;
use postrider_relay::sinks::StdoutSink;

use super::{Received, Rig, parse_line};

/// What was written, and whether the reader has gone.
#[derive(Clone, Debug, Default)]
pub struct StdoutRig {
    written: Arc<Mutex<Vec<u8>>>,
    broken: Arc<AtomicBool>,
}

struct Pipe(StdoutRig);

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.broken.load(Ordering::SeqCst) {
            return Err(std::io::ErrorKind::BrokenPipe.into());
        }
        self.0.written.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[async_trait]
impl Rig for StdoutRig {
    async fn open(&self) -> Arc<dyn Sink> {
        Arc::new(StdoutSink::to(Box::new(Pipe(self.clone())), Duration::from_secs(5)))
    }

    async fn received(&self) -> Vec<Received> {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner).clone();
        String::from_utf8(written).expect("text").lines().map(parse_line).collect()
    }

    async fn stop(&self) {
        self.broken.store(true, Ordering::SeqCst);
    }

    async fn start(&self) {
        self.broken.store(false, Ordering::SeqCst);
    }
}
