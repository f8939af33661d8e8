//! What the demo tells while it happens, for someone who has never heard of an outbox.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Instant;

use super::verdict::{Compared, Report};
use super::{Counted, Event, Places, Progress};
use crate::args::{Demo, Without};

/// Of each kind of happening so many are told; the rest are counted.
const TOLD: u32 = 3;

/// Tells to standard output; with --json to standard error, so that the report stands alone.
pub(super) struct Story {
    to_stderr: bool,
    colours: bool,
    began: Instant,
    told: std::collections::HashMap<&'static str, u32>,
    next_milestone: usize,
}

#[derive(Clone, Copy)]
enum Colour {
    Plain,
    Grey,
    Green,
    Yellow,
    Red,
}

impl Colour {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "0",
            Self::Grey => "2",
            Self::Green => "32",
            Self::Yellow => "33",
            Self::Red => "1;31",
        }
    }
}

impl Story {
    pub(super) fn new(to_stderr: bool) -> Self {
        let terminal =
            if to_stderr { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
        let colours = terminal && std::env::var_os("NO_COLOR").is_none();
        Self { to_stderr, colours, began: Instant::now(), told: Default::default(), next_milestone: 0 }
    }

    pub(super) fn opening(&mut self, args: &Demo, seed: u64, places: &Places) {
        self.plain(
            "A bank tells others about every transfer. It must tell what happened, all of it, in order,",
        );
        self.plain("and nothing that did not happen, although machines fail. This is how Postrider does it:");
        self.plain("");
        self.plain("  bank      writes the transfer and a message into its own database, in one transaction");
        self.plain("  relay     reads the messages that were committed, and hands each to the sink until it says \"I have it\"");
        self.plain("  sink      where messages go: here a file, in real life a broker");
        self.plain("  consumer  reads the sink, and applies each message once, even if it arrives twice");
        self.plain("");
        let keep = if args.keep.is_some() {
            format!(", files in {}", places.folder.display())
        } else {
            String::new()
        };
        self.plain(&format!("{} transfers, seed {seed}{keep}.", args.messages));
        if let Some(without) = args.without {
            let what = match without {
                Without::Lanes => "messages of one payer no longer wait for each other",
                Without::Ack => "the relay records a message as sent before the sink has acknowledged it",
                Without::Inbox => "the consumer does not remember what it has applied",
                Without::Transaction => "transfer and message are written in two transactions",
            };
            self.say(Colour::Red, "demo", &format!("one protection is off: {what}"));
        }
        self.plain("");
    }

    pub(super) fn tell(&mut self, event: &Event, progress: &Progress) {
        match event {
            Event::Committed { transfer, words } => {
                self.some(
                    "committed",
                    Colour::Plain,
                    "bank",
                    &format!("transfer {transfer}: {words}; committed, with its message"),
                );
            }
            Event::RolledBack { transfer, words } => self.some(
                "rolled back",
                Colour::Yellow,
                "bank",
                &format!("transfer {transfer}: {words}; rolled back, and the message with it"),
            ),
            Event::Broke { transfer, words } => self.some(
                "broke",
                Colour::Yellow,
                "bank",
                &format!("transfer {transfer}: {words}; the application breaks before it wrote the message"),
            ),
            Event::BankDone { committed, rolled_back } => {
                self.say(
                    Colour::Plain,
                    "bank",
                    &format!("done: {committed} transfers committed, {rolled_back} did not happen"),
                );
            }
            Event::RelayStarted => self.say(Colour::Plain, "relay", "started, in a process of its own"),
            Event::Refused { id } => {
                self.some(
                    "refused",
                    Colour::Yellow,
                    "sink",
                    &format!("refuses {id} for now; the relay will try again, later ones of this payer wait"),
                );
            }
            Event::AnswerLost { id } => self.some(
                "answer lost",
                Colour::Yellow,
                "sink",
                &format!("takes {id}, but its answer gets lost; the relay must send it again"),
            ),
            Event::SinkDown => self.say(
                Colour::Red,
                "sink",
                "is down; the relay probes with one message and counts nothing against it",
            ),
            Event::SinkUp => self.say(Colour::Green, "sink", "is back"),
            Event::Holding { .. } => {}
            Event::Repeat { id } => {
                self.some(
                    "repeat",
                    Colour::Grey,
                    "consumer",
                    &format!("{id} again: applied before, so nothing happens"),
                );
            }
            Event::Applied { .. } => self.milestone(progress),
            Event::RelayEnded { how } => self.say(Colour::Red, "relay", &format!("ended by itself: {how}")),
        }
    }

    pub(super) fn killed(&mut self, messages: u32) {
        let what = match messages {
            1 => "1 message is acknowledged by the sink, and the relay has not recorded it yet".to_owned(),
            n => format!("{n} messages are acknowledged by the sink, and the relay has not recorded it yet"),
        };
        self.say(Colour::Red, "demo", &format!("the worst moment: {what}. kill -9"));
        self.say(
            Colour::Red,
            "demo",
            "the relay is dead. A new one starts, and takes over when the lease of the dead one has run out",
        );
    }

    fn milestone(&mut self, progress: &Progress) {
        let applied = progress.applied.len();
        if applied < self.next_milestone {
            return;
        }
        self.next_milestone = if applied < 10 { 25 } else { applied + 50 };
        let of = if progress.bank_done { "" } else { " so far" };
        self.say(
            Colour::Green,
            "consumer",
            &format!("has applied {applied} of {} transfers{of}", progress.committed),
        );
    }

    pub(super) fn verdict(&mut self, compared: &Compared, counted: &Counted, keep: Option<&Path>) {
        self.plain("");
        let faults = format!(
            "Faults: {} refusals, {} lost answers, {} outage of the sink, {} kill -9 of the relay.",
            counted.refused,
            counted.answers_lost,
            counted.outages,
            u32::from(counted.killed),
        );
        self.plain(&faults);
        if counted.stuck {
            self.plain("Nothing happened any more before everything was applied.");
        }
        self.plain("The books, compared without asking the relay:");
        self.plain("");
        for (name, number, meaning) in compared.report.lines() {
            let wrong = Report::must_be_zero(name) && number > 0;
            let text = format!("  {name:<14}{number:>8}  {meaning}");
            let text = if wrong { self.paint(Colour::Red, &text) } else { text };
            self.plain(&text);
        }
        self.plain("");
        let agree = if compared.books_agree { "every account agrees" } else { "the accounts do NOT agree" };
        self.plain(&format!(
            "Money: {} coins at the start, {} at the bank, {} in the consumer's books; {agree}.",
            compared.money_at_start, compared.money_at_bank, compared.money_in_books
        ));
        if let Some(folder) = keep {
            self.plain(&format!("Databases and files: {}", folder.display()));
        }
        let text = match compared.report.is_ok() {
            true => self.paint(
                Colour::Green,
                "Verdict: ok. Nothing lost, nothing invented, nothing reordered, nothing applied twice.",
            ),
            false => self.paint(Colour::Red, "Verdict: failed."),
        };
        self.plain(&text);
    }

    /// Tells the first few of a kind.
    fn some(&mut self, kind: &'static str, colour: Colour, who: &str, text: &str) {
        let told = self.told.entry(kind).or_insert(0);
        *told += 1;
        match *told {
            n if n < TOLD => self.say(colour, who, text),
            TOLD => self.say(colour, who, &format!("{text} (further ones are counted, not told)")),
            _ => {}
        }
    }

    fn say(&mut self, colour: Colour, who: &str, text: &str) {
        let seconds = self.began.elapsed().as_secs_f32();
        let line = format!("{seconds:6.2} s  {who:<8}  {}", self.paint(colour, text));
        self.plain(&line);
    }

    fn paint(&self, colour: Colour, text: &str) -> String {
        if self.colours { format!("\u{1b}[{}m{text}\u{1b}[0m", colour.code()) } else { text.to_owned() }
    }

    fn plain(&mut self, line: &str) {
        // A reader that has gone away (`| head`) does not change what is measured.
        let written = if self.to_stderr {
            writeln!(std::io::stderr(), "{line}")
        } else {
            writeln!(std::io::stdout(), "{line}")
        };
        if written.is_err() {
            self.colours = false;
        }
    }
}
