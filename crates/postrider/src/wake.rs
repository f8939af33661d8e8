//! Hints within this process: "something was committed". Losing one costs latency, never a message.

use std::sync::LazyLock;

use tokio::sync::watch;

static HINTS: LazyLock<watch::Sender<u64>> = LazyLock::new(|| watch::channel(0).0);

/// Wakes the relays embedded in this process. Fire it after the commit; before it, they find nothing.
///
/// Dropping it costs latency only: a relay looks by itself. Firing it without an embedded relay does nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint(());

impl Hint {
    /// Wakes every receiver of [`hints`]. Cheap, never blocks.
    pub fn fire(self) {
        HINTS.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// A receiver of the hints that are fired in this process from now on.
#[must_use]
pub fn hints() -> HintReceiver {
    HintReceiver { hints: HINTS.subscribe() }
}

/// Waits for hints; see [`hints`]. Each receiver sees every hint.
#[derive(Debug)]
pub struct HintReceiver {
    hints: watch::Receiver<u64>,
}

impl HintReceiver {
    /// Returns at the next hint. A hint given between two waits is kept; many count as one. Can be cancelled without
    /// losing a hint.
    pub async fn wait(&mut self) {
        if self.hints.changed().await.is_err() {
            // The sender lives as long as the process; if it ever went, no hint could come.
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// True if a hint is there now: a cancelled wait loses none.
    async fn hinted(receiver: &mut HintReceiver) -> bool {
        tokio::time::timeout(Duration::ZERO, receiver.wait()).await.is_ok()
    }

    // One test: the hints are one thing for the whole process.
    #[tokio::test]
    async fn hints_are_kept_between_waits_and_many_count_as_one() {
        let mut one = hints();
        let mut other = hints();
        assert!(!hinted(&mut one).await);
        Hint::default().fire();
        Hint::default().fire();
        assert!(hinted(&mut one).await);
        assert!(!hinted(&mut one).await);
        assert!(hinted(&mut other).await, "each receiver sees it");
        let waiting = tokio::spawn(async move { one.wait().await });
        tokio::task::yield_now().await;
        Hint::default().fire();
        waiting.await.expect("a waiting receiver wakes");
        assert!(!hinted(&mut hints()).await, "a new receiver sees new hints only");
    }
}
