//! The documents are true: their links lead somewhere, the tests they name exist, and their tables of settings, metrics,
//! commands and flags are those of the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use postrider_relay::config::{Config, Flags, load};
use secrecy::ExposeSecret as _;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every file of the repository with this ending, hidden folders and build output apart.
fn files(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if entry.is_dir() && !name.starts_with('.') && name != "target" {
            files(&entry, ending, found);
        } else if name.ends_with(ending) {
            found.push(entry);
        }
    }
}

/// The text outside of fenced blocks.
fn prose(text: &str) -> String {
    let mut fenced = false;
    let kept = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    });
    kept.collect::<Vec<_>>().join("\n")
}

/// (text, target) of every `[text](target)`.
fn links(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("](") {
        let label = text[..at].rsplit('[').next().unwrap_or_default();
        let target = text[at + 2..].split(')').next().unwrap_or_default();
        found.push((label.to_owned(), target.to_owned()));
    }
    found
}

/// What a heading is called in an address.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars()
        .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

fn has_anchor(text: &str, wanted: &str) -> bool {
    let text = prose(text);
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#'))).any(|name| name == wanted)
}

/// Whether `text` has this name as a word of its own.
fn names(text: &str, name: &str) -> bool {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == name)
}

#[test]
fn links_lead_somewhere_and_the_tests_they_name_exist() {
    let mut documents = Vec::new();
    files(&root(), ".md", &mut documents);
    let mut wrong = Vec::new();
    for document in &documents {
        let text = fs::read_to_string(document).expect("a document");
        for (label, target) in links(&prose(&text)) {
            if target.contains("://") {
                continue;
            }
            let (path, wanted) = target.split_once('#').unwrap_or((&target, ""));
            let file = match path {
                "" => document.clone(),
                _ => document.parent().expect("a folder").join(path),
            };
            let found = fs::read_to_string(&file).unwrap_or_default();
            // A link to Rust code whose text is a name promises that the name is there.
            let name = label.trim_matches('`');
            let named = path.ends_with(".rs") && label.starts_with('`') && !name.contains(['.', '/']);
            if !file.exists()
                || (!wanted.is_empty() && !has_anchor(&found, wanted))
                || (named && !names(&found, name))
            {
                wrong.push(format!("{}: [{label}]({target})", document.display()));
            }
        }
    }
    assert!(documents.len() > 10, "{documents:?}");
    assert!(wrong.is_empty(), "these lead nowhere:\n{}", wrong.join("\n"));
}

/// The cells of the rows of the first table after `mark`.
fn table(text: &str, mark: &str) -> Vec<Vec<String>> {
    let after = text.split_once(mark).unwrap_or_else(|| panic!("no {mark}")).1;
    let rows =
        after.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
    rows.skip(2).map(cells).collect()
}

/// Every string literal of `text` that begins with `start`, without it.
fn literals(text: &str, start: &str) -> BTreeSet<String> {
    let starts = text.match_indices(start).map(|(at, _)| &text[at + start.len()..]);
    starts.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())).collect()
}

fn code(text: &str) -> Option<&str> {
    text.strip_prefix('`')?.strip_suffix('`')
}

fn configured(variables: &BTreeMap<String, String>) -> Config {
    load(None, variables, &Flags::default()).unwrap_or_else(|error| panic!("{error:?} for {variables:?}"))
}

/// The environment variable and the default of every setting on the page about the configuration.
fn documented_defaults() -> BTreeMap<String, String> {
    let page = read("docs/configuration.md");
    let rows =
        page.lines().filter(|line| line.starts_with("| `")).map(|line| line.trim_matches('|').split('|'));
    let defaults = rows.filter_map(|mut cells| {
        let default = cells.nth(1)?.trim().trim_matches('`').to_owned();
        let variable = cells.next_back()?.split('`').nth(1)?.to_owned();
        // In words: there is no value to write.
        (!["none", "the host name"].contains(&default.as_str())).then_some((variable, default))
    });
    defaults.collect()
}

#[test]
fn setting_every_documented_default_changes_nothing() {
    let variables = documented_defaults();
    assert!(variables.len() > 25, "{variables:?}");
    let (set, plain) = (configured(&variables), configured(&BTreeMap::new()));
    assert_eq!(set.relay, plain.relay);
    assert_eq!(
        (set.drain, set.log, set.source.connections),
        (plain.drain, plain.log, plain.source.connections)
    );
    assert_eq!(set.source.database.expose_secret(), plain.source.database.expose_secret());
    assert_eq!(set.sink.url.expose_secret(), plain.sink.url.expose_secret());
}

#[test]
fn the_table_of_metrics_names_every_metric() {
    let rows = table(&read("docs/operations.md"), "<!-- metrics:");
    let documented: BTreeSet<String> =
        rows.iter().filter_map(|row| Some(code(&row[0])?.to_owned())).collect();
    let mut sources = Vec::new();
    files(&root().join("crates/postrider-relay/src"), ".rs", &mut sources);
    let texts = sources.iter().map(|path| fs::read_to_string(path).expect("a source file"));
    let recorded: BTreeSet<String> = texts
        .flat_map(|text| literals(&text, "\"postrider_"))
        .map(|name| format!("postrider_{name}"))
        .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))
        .filter(|name| !["postrider_schema", "postrider_relay"].contains(&name.as_str()))
        .collect();
    assert_eq!(documented, recorded);
}

/// The long flags in a text.
fn flags(text: &str) -> BTreeSet<String> {
    let parts = text.split(|c: char| !(c.is_ascii_lowercase() || c == '-'));
    parts.filter(|part| part.starts_with("--") && part.len() > 3).map(str::to_owned).collect()
}

#[test]
fn the_page_of_the_command_line_names_every_command_and_flag() {
    let help = |command: &str| {
        let arguments = command.split(' ').skip(1).chain(["--help"]);
        let output = Command::new(env!("CARGO_BIN_EXE_postrider")).args(arguments).output().expect("it runs");
        assert!(output.status.success(), "{command}");
        String::from_utf8(output.stdout).expect("text")
    };
    let page = read("docs/cli.md");
    let global = table(&page, "## Flags of every command").iter().flat_map(|row| flags(&row[0])).collect();
    let mut commands = BTreeSet::new();
    for row in table(&page, "# Command line") {
        let Some(command) = code(&row[0]) else { continue };
        // The part of the help that lists options; its prose may mention those of other commands.
        let help = help(command);
        let options =
            help.split_once("\nOptions:").expect("options").1.split("\nEXAMPLES").next().unwrap_or_default();
        let listed: BTreeSet<String> =
            options.lines().filter(|line| line.trim_start().starts_with('-')).flat_map(flags).collect();
        let all: BTreeSet<String> =
            flags(&row[1]).union(&global).cloned().chain(["--help".to_owned()]).collect();
        assert_eq!(listed, all, "{command}");
        commands.insert(command.to_owned());
    }
    for word in ["demo", "init", "run", "send", "status", "list", "show", "dead"] {
        assert!(help("postrider").contains(&format!("\n  {word} ")), "{word}");
        assert!(commands.iter().any(|command| command.starts_with(&format!("postrider {word}"))), "{word}");
    }
    assert_eq!(commands.len(), 11, "{commands:?}");
}
