//! What commands print: aligned tables, times in UTC, JSON.

use std::io::{self, Write};
use std::time::Duration;

/// Prints one JSON document and a line end.
pub(crate) fn json(value: &serde_json::Value) -> io::Result<()> {
    write(&value.to_string())
}

/// Prints text and a line end.
pub(crate) fn line(text: &str) -> io::Result<()> {
    write(text)
}

/// A reader that has had enough (`postrider list | head`) is no error.
fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// A table with aligned columns, two spaces between them. The last column is not padded.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let clean: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|c| printable(c)).collect()).collect();
    let widths: Vec<usize> = (0..head.len())
        .map(|i| {
            clean.iter().map(|r| r[i].chars().count()).chain([head[i].chars().count()]).max().unwrap_or(0)
        })
        .collect();
    let mut out = String::new();
    let heads: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    for row in std::iter::once(&heads).chain(&clean) {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(i, (cell, width))| {
                let pad = if i + 1 == row.len() { 0 } else { width - cell.chars().count() };
                format!("{cell}{}", " ".repeat(pad))
            })
            .collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
    out.pop();
    out
}

/// Text from a table for a terminal: control characters (which could move the cursor) become `·`.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '·' } else { c }).collect()
}

/// Microseconds since 1970 as `2026-11-30 21:08:38.123Z`.
pub(crate) fn time(us: i64) -> String {
    match jiff::Timestamp::from_microsecond(us) {
        Ok(t) => t.strftime("%Y-%m-%d %H:%M:%S%.3fZ").to_string(),
        Err(_) => format!("{us} µs"),
    }
}

/// Microseconds since 1970 as RFC 3339, for JSON.
pub(crate) fn rfc3339(us: i64) -> String {
    jiff::Timestamp::from_microsecond(us).map_or_else(|_| us.to_string(), |t| t.to_string())
}

/// A length of time for people: `350 ms`, `12 s`, `3 min 5 s`, `2 h 10 min`, `4 d 3 h`.
pub(crate) fn span(d: Duration) -> String {
    let s = d.as_secs();
    match s {
        0 => format!("{} ms", d.as_millis()),
        1..60 => format!("{s} s"),
        60..3_600 => format!("{} min {} s", s / 60, s % 60),
        3_600..86_400 => format!("{} h {} min", s / 3_600, s % 3_600 / 60),
        _ => format!("{} d {} h", s / 86_400, s % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_control_characters_go() {
        let text = table(
            &["a", "bb"],
            &[vec!["lang".to_owned(), "x".to_owned()], vec!["\u{1b}[2J".to_owned(), "yy".to_owned()]],
        );
        assert_eq!(text, "a     bb\nlang  x\n·[2J  yy");
    }

    #[test]
    fn times_are_utc() {
        assert_eq!(time(0), "1970-01-01 00:00:00.000Z");
        assert_eq!(span(Duration::from_secs(185)), "3 min 5 s");
    }
}
