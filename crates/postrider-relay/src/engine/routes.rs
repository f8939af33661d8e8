//! Which sink a topic goes to.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::EngineError;
use crate::core::{Route, SinkId};
use crate::sink::{NamedSink, Sink};

/// Ordered routes; the first match wins, the first sink takes the rest.
#[derive(Clone)]
pub(super) struct Routes {
    sinks: Vec<Arc<dyn Sink>>,
    routes: Vec<(Pattern, SinkId)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Exact(String),
    Prefix(String),
}

impl Pattern {
    fn matches(&self, topic: &str) -> bool {
        match self {
            Self::Exact(t) => t == topic,
            Self::Prefix(p) => topic.starts_with(p.as_str()),
        }
    }
}

impl Routes {
    pub(super) fn new(sinks: &[NamedSink], routes: &[(String, String)]) -> Result<Self, EngineError> {
        if sinks.is_empty() {
            return Err(EngineError::NoSink);
        }
        let mut ids = BTreeMap::new();
        for (i, s) in sinks.iter().enumerate() {
            if ids.insert(s.name.to_string(), SinkId(i)).is_some() {
                return Err(EngineError::SinkNamedTwice(s.name.to_string()));
            }
        }
        let routes = routes
            .iter()
            .map(|(pattern, sink)| {
                let id = ids.get(sink).copied().ok_or_else(|| EngineError::UnknownSink {
                    pattern: pattern.clone(),
                    sink: sink.clone(),
                })?;
                let pattern = match pattern.strip_suffix('*') {
                    Some(prefix) => Pattern::Prefix(prefix.to_owned()),
                    None => Pattern::Exact(pattern.clone()),
                };
                Ok((pattern, id))
            })
            .collect::<Result<_, EngineError>>()?;
        Ok(Self { sinks: sinks.iter().map(|s| s.sink.clone()).collect(), routes })
    }
}

impl Route for Routes {
    fn route(&self, topic: &str) -> (SinkId, Arc<str>) {
        let id = self.routes.iter().find(|(p, _)| p.matches(topic)).map_or(SinkId(0), |(_, id)| *id);
        (id, self.sinks[id.0].destination(topic).into())
    }
}
