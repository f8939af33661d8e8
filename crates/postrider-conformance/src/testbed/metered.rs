//! A reader that notes what each single call costs the server. Its calls of one kind run one after the other, so that
//! the difference of the server's counters belongs to one call.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postrider_relay::message::{Lane, Position};
use postrider_relay::source::{DueCursor, Heads, Messages, Owned, Range, Reader, Source, SourceError};

use super::costs::{Cost, Costs, Kind};

/// What a read of narrow rows is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// What is new.
    Head,
    /// What has committed late below it.
    Window,
    /// What no window can know, from the very start.
    Sweep,
    /// A second reading of a part, for lanes that were held.
    Rescan,
    /// What has fallen due.
    Due,
    /// The same from the very start, once the cursor has left it.
    DueSweep,
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// What for.
    pub purpose: Purpose,
    /// Rows it returned.
    pub rows: u64,
    /// Pages it touched.
    pub pages: u64,
    /// Its time on the server.
    pub took: Duration,
    /// For windows and sweeps: how many ids lie between its bounds.
    pub ids: u64,
}

/// The calls of a phase.
#[derive(Clone, Debug, Default)]
pub struct Looks(pub Vec<Look>);

impl Looks {
    /// Those for one purpose.
    pub fn of(&self, purpose: Purpose) -> impl Iterator<Item = &Look> {
        self.0.iter().filter(move |l| l.purpose == purpose)
    }

    /// Most pages of a call that returned nothing, leaving out two calls or one in a hundred: the first on each connection
    /// also reads some ten pages of the catalogue, and so does one after an invalidation.
    #[must_use]
    pub fn most_idle(&self, purpose: Purpose) -> u64 {
        let mut pages: Vec<u64> = self.of(purpose).filter(|l| l.rows == 0).map(|l| l.pages).collect();
        pages.sort_unstable();
        let left_out = (pages.len() / 100).max(2);
        pages.iter().rev().nth(left_out).copied().unwrap_or(0)
    }

    /// The highest count of pages above `free`, per returned row, of a call that returned some.
    #[must_use]
    pub fn most_per_row(&self, purpose: Purpose, free: u64) -> f64 {
        let loaded = self.of(purpose).filter(|l| l.rows > 0);
        loaded.map(|l| l.pages.saturating_sub(free) as f64 / l.rows as f64).fold(0.0, f64::max)
    }

    /// Server time of all calls for a purpose.
    #[must_use]
    pub fn took(&self, purpose: Purpose) -> Duration {
        self.of(purpose).map(|l| l.took).sum()
    }
}

/// Where the calls are noted. Clones share it.
#[derive(Clone)]
pub struct Meter {
    costs: Costs,
    looks: Arc<Mutex<Vec<Look>>>,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").finish_non_exhaustive()
    }
}

impl Meter {
    /// A meter on the database of `costs`.
    #[must_use]
    pub fn new(costs: &Costs) -> Self {
        Self { costs: costs.clone(), looks: Arc::default() }
    }

    /// `source` with its reads noted.
    #[must_use]
    pub fn on(&self, source: Source) -> Source {
        let reader = Metered {
            inner: Arc::clone(&source.reader),
            meter: self.clone(),
            heads: Turn::default(),
            due: Turn::default(),
            cursor_moved: AtomicBool::new(false),
            sweep_to: AtomicI64::new(0),
        };
        Source { reader: Arc::new(reader), ..source }
    }

    /// Takes what was noted since the last time.
    #[must_use]
    pub fn take(&self) -> Looks {
        Looks(std::mem::take(&mut *self.looks.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// How many calls for `purpose` were noted since the last [`Meter::take`].
    #[must_use]
    pub fn seen(&self, purpose: Purpose) -> usize {
        let looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        looks.iter().filter(|l| l.purpose == purpose).count()
    }

    /// Waits for the server to have counted the call after `before`, and notes it.
    async fn note(
        &self,
        turn: &mut Option<(i64, Cost)>,
        kind: Kind,
        purpose: Purpose,
        rows: usize,
        ids: u64,
    ) {
        let Some((id, before)) = *turn else {
            // The first call of all gave the statement its number; what it cost is not told apart.
            if let Some(id) = self.costs.query_id(kind).await {
                *turn = Some((id, self.costs.one(id).await));
            }
            return;
        };
        let mut now = self.costs.one(id).await;
        while now.calls <= before.calls {
            tokio::task::yield_now().await;
            now = self.costs.one(id).await;
        }
        *turn = Some((id, now));
        let look = Look {
            purpose,
            rows: rows as u64,
            pages: now.pages - before.pages,
            took: now.took.saturating_sub(before.took),
            ids,
        };
        // Two calls in one difference: the other was by somebody else, or failed on our side.
        if now.calls == before.calls + 1 {
            self.looks.lock().unwrap_or_else(PoisonError::into_inner).push(look);
        }
    }
}

/// The statement's number and its counters after the last call.
type Turn = tokio::sync::Mutex<Option<(i64, Cost)>>;

struct Metered {
    inner: Arc<dyn Reader>,
    meter: Meter,
    heads: Turn,
    due: Turn,
    /// The cursor has left the start.
    cursor_moved: AtomicBool,
    /// Where a sweep goes on; 0 = at the start.
    sweep_to: AtomicI64,
}

impl Metered {
    fn next_slice(&self) -> Position {
        Position(self.sweep_to.load(Ordering::Relaxed))
    }
}

#[async_trait]
impl Reader for Metered {
    async fn heads(&self, owned: &[Owned], range: Range) -> Result<Heads, SourceError> {
        let purpose = match range.up_to {
            None => Purpose::Head,
            // The only read without a limit.
            Some(_) if range.limit == u32::MAX => Purpose::Window,
            Some(_) if range.after == Position::default() || self.next_slice() == range.after => {
                Purpose::Sweep
            }
            Some(_) => Purpose::Rescan,
        };
        let ids = range.up_to.map_or(0, |to| (to.0 - range.after.0).unsigned_abs());
        let mut turn = self.heads.lock().await;
        let heads = self.inner.heads(owned, range).await?;
        if purpose == Purpose::Sweep {
            let full = heads.rows.len() >= range.limit as usize;
            let last = heads.rows.last().filter(|_| full).map(|h| h.position);
            self.sweep_to.store(last.unwrap_or_default().0, Ordering::Relaxed);
        }
        self.meter.note(&mut turn, Kind::Heads, purpose, heads.rows.len(), ids).await;
        Ok(heads)
    }

    async fn due(&self, owned: &[Owned], after: DueCursor, limit: u32) -> Result<Heads, SourceError> {
        let from_start = after == DueCursor::default();
        self.cursor_moved.fetch_or(!from_start, Ordering::Relaxed);
        let sweep = from_start && self.cursor_moved.load(Ordering::Relaxed);
        let purpose = if sweep { Purpose::DueSweep } else { Purpose::Due };
        let mut turn = self.due.lock().await;
        let heads = self.inner.due(owned, after, limit).await?;
        self.meter.note(&mut turn, Kind::Due, purpose, heads.rows.len(), 0).await;
        Ok(heads)
    }

    async fn lane(&self, owned: Owned, lane: &Lane, range: Range) -> Result<Heads, SourceError> {
        self.inner.lane(owned, lane, range).await
    }

    async fn messages(&self, owned: &[Owned], positions: &[Position]) -> Result<Messages, SourceError> {
        self.inner.messages(owned, positions).await
    }
}
