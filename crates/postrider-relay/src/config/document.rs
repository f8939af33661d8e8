//! From the text of the file to typed sections: unknown names, `${NAME}`, environment and flags laid over, places kept.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::fields::{self, FIELDS, Takes};
use super::sections::Sections;
use super::{ConfigError, Flags, Origin, expand};

/// A value from outside the file.
pub(super) struct Overlay {
    path: &'static str,
    value: String,
    origin: Origin,
}

/// Where each field that is set comes from.
#[derive(Debug, Default)]
pub(super) struct Origins {
    by_path: BTreeMap<String, Origin>,
}

impl Origins {
    pub(super) fn of(&self, path: &str) -> Origin {
        self.by_path.get(path).cloned().unwrap_or(Origin::Default)
    }

    /// The error at the field's place.
    pub(super) fn error(&self, path: &str, what: impl Into<String>) -> ConfigError {
        ConfigError::new(what).at(self.of(path))
    }
}

/// The values of the environment, then those of flags: later ones win.
pub(super) fn overlays(environment: &BTreeMap<String, String>, flags: &Flags) -> Vec<Overlay> {
    let variables = FIELDS.iter().filter_map(|f| {
        let name = fields::variable(f.path);
        let value = environment.get(&name)?.clone();
        Some(Overlay { path: f.path, value, origin: Origin::Variable(name) })
    });
    let given = [
        ("source.database", "--database", &flags.database),
        ("sink.url", "--sink", &flags.sink),
        ("instance", "--instance", &flags.instance),
        ("http.listen", "--listen", &flags.listen),
        ("log.format", "--log-format", &flags.log_format),
        ("log.level", "--log-level", &flags.log_level),
    ];
    let given = given.into_iter().filter_map(|(path, flag, value)| {
        Some(Overlay { path, value: value.clone()?, origin: Origin::Flag(flag) })
    });
    variables.chain(given).collect()
}

/// Reads `text` and lays `overlays` over it.
pub(super) fn read<'a>(
    text: &'a str,
    file: Option<&Path>,
    environment: &BTreeMap<String, String>,
    overlays: &'a [Overlay],
) -> Result<(Sections, Origins), ConfigError> {
    let file = file.map(Path::to_owned).unwrap_or_default();
    let mut document = Document { text, file, origins: Origins::default(), values: Vec::new() };
    let mut root = DeTable::parse(text).map_err(|e| {
        let line = e.span().map_or(1, |s| document.line(s.start));
        ConfigError::new(format!("this is not TOML: {}", e.message()))
            .at(Origin::Line(document.file.clone(), line))
    })?;
    document.walk("", root.get_mut(), &|name| environment.get(name).cloned())?;
    for layer in [Layer::Environment, Layer::Flags] {
        let members: Vec<&Overlay> = overlays.iter().filter(|o| layer.holds(o)).collect();
        for overlay in &members {
            document.forget_replaced(root.get_mut(), overlay.path);
        }
        for overlay in members {
            document.lay_over(root.get_mut(), overlay)?;
        }
    }
    let sections = Sections::deserialize(toml::Deserializer::from(root)).map_err(|e| document.explain(&e))?;
    Ok((sections, document.origins))
}

#[derive(Clone, Copy)]
enum Layer {
    Environment,
    Flags,
}

impl Layer {
    fn holds(self, overlay: &Overlay) -> bool {
        matches!(
            (self, &overlay.origin),
            (Self::Environment, Origin::Variable(_)) | (Self::Flags, Origin::Flag(_))
        )
    }
}

struct Document<'a> {
    text: &'a str,
    file: PathBuf,
    origins: Origins,
    /// Where the value of each field stands in the text.
    values: Vec<(Range<usize>, &'static str)>,
}

impl<'a> Document<'a> {
    fn line(&self, offset: usize) -> usize {
        let end = offset.min(self.text.len());
        self.text.as_bytes()[..end].iter().filter(|b| **b == b'\n').count() + 1
    }

    /// Refuses unknown names, replaces `${NAME}`, notes lines.
    fn walk(
        &mut self,
        section: &str,
        table: &mut DeTable<'a>,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(), ConfigError> {
        for (key, value) in table.iter_mut() {
            let name: &str = key.get_ref();
            let path = join(section, name);
            let origin = Origin::Line(self.file.clone(), self.line(key.span().start));
            if let DeValue::Table(inner) = value.get_mut() {
                if fields::is_section(&path) {
                    self.walk(&path, inner, variable)?;
                    continue;
                }
            } else if fields::is_section(&path) {
                return Err(ConfigError::new(format!("`{path}` must be a section"))
                    .at(origin)
                    .cure(format!("write [{path}] on a line of its own and its fields below")));
            }
            let Some(field) = fields::find(&path) else {
                return Err(unknown(section, name).at(origin));
            };
            self.values.push((value.span(), field.path));
            if let DeValue::String(text) = value.get_mut() {
                let expanded = expand::expand(text, variable).map_err(|why| {
                    ConfigError::new(format!("`{path}` {why}"))
                        .at(&origin)
                        .cure("set the variable, or write $${ for a plain ${")
                })?;
                *text = Cow::Owned(expanded);
            }
            self.origins.by_path.insert(path, origin);
        }
        Ok(())
    }

    /// A value of a higher layer also replaces what says the same in another way: an address its file and its password.
    fn forget_replaced(&mut self, root: &mut DeTable<'a>, path: &str) {
        let gone: &[&str] = match path {
            "source.database" | "source.database_url_file" => {
                &["source.database", "source.database_url_file", "source.password", "source.password_file"]
            }
            "source.password" | "source.password_file" => &["source.password", "source.password_file"],
            "sink.url" | "sink.url_file" => {
                &["sink.url", "sink.url_file", "sink.password", "sink.password_file"]
            }
            "sink.password" | "sink.password_file" => &["sink.password", "sink.password_file"],
            _ => &[],
        };
        for path in gone {
            self.origins.by_path.remove(*path);
            if let Some((section, name)) = path.split_once('.')
                && let Some(DeValue::Table(table)) = root.get_mut(section).map(Spanned::get_mut)
            {
                table.remove(name);
            }
        }
    }

    fn lay_over(&mut self, root: &mut DeTable<'a>, overlay: &'a Overlay) -> Result<(), ConfigError> {
        let takes = fields::find(overlay.path).map_or(Takes::Text, |f| f.takes);
        let value = if takes.is_text() {
            DeValue::String(Cow::Borrowed(&overlay.value))
        } else {
            let number = DeValue::parse(overlay.value.trim()).map(Spanned::into_inner);
            number.map_err(|_| must_be(overlay.path, takes).at(&overlay.origin))?
        };
        let mut table = root;
        let mut rest = overlay.path;
        while let Some((section, name)) = rest.split_once('.') {
            let entry = table
                .entry(Spanned::new(0..0, Cow::Borrowed(section)))
                .or_insert_with(|| Spanned::new(0..0, DeValue::Table(DeTable::new())));
            let DeValue::Table(inner) = entry.get_mut() else {
                return Err(ConfigError::new(format!("`{section}` must be a section")).at(&overlay.origin));
            };
            table = inner;
            rest = name;
        }
        // The span says later which field an error is about: beyond the text, by the field's number.
        let number = FIELDS.iter().position(|f| f.path == overlay.path).unwrap_or_default();
        let mark = self.text.len() + 1 + number;
        table.remove(rest);
        table.insert(Spanned::new(mark..mark, Cow::Borrowed(rest)), Spanned::new(mark..mark, value));
        self.origins.by_path.insert(overlay.path.to_owned(), overlay.origin.clone());
        Ok(())
    }

    /// A wrong type or constraint, told by the field's own constraint and never by its value.
    fn explain(&self, error: &toml::de::Error) -> ConfigError {
        let Some(span) = error.span() else {
            return ConfigError::new("a field has the wrong type").at(self.file.display());
        };
        if let Some(field) = span.start.checked_sub(self.text.len() + 1).and_then(|n| FIELDS.get(n)) {
            return must_be(field.path, field.takes).at(self.origins.of(field.path));
        }
        let origin = Origin::Line(self.file.clone(), self.line(span.start));
        let at = self.values.iter().find(|(place, _)| place.start <= span.start && span.start < place.end);
        match at.and_then(|(_, path)| fields::find(path)) {
            Some(field) => must_be(field.path, field.takes).at(origin),
            None => ConfigError::new("a field has the wrong type").at(origin),
        }
    }
}

fn join(section: &str, name: &str) -> String {
    if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") }
}

fn must_be(path: &str, takes: Takes) -> ConfigError {
    ConfigError::new(format!("`{path}` must be {}", takes.words()))
}

fn unknown(section: &str, name: &str) -> ConfigError {
    let (kind, place) = match section {
        "" => ("field or section", String::new()),
        _ => ("field", format!(" in [{section}]")),
    };
    let cure = match fields::nearest(section, name) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("known here: {}", fields::quoted(&fields::names_in(section))),
    };
    ConfigError::new(format!("unknown {kind} `{name}`{place}")).cure(cure)
}
