//! The rig of the file sink.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use postrider_relay::sink::Sink;
use postrider_relay::sinks::{SinkOptions, connect};
use tempfile::TempDir;

use super::{Received, Rig, parse_line};

/// A file in a folder of its own. Stopping moves the folder away, as when a file system is unmounted.
#[derive(Debug)]
pub struct FileRig {
    dir: TempDir,
}

impl FileRig {
    /// A folder without the file.
    ///
    /// # Panics
    /// When there is no temporary folder.
    #[must_use]
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir(dir.path().join("here")).expect("a folder");
        Self { dir }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("here/out.jsonl")
    }
}

impl Default for FileRig {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Rig for FileRig {
    async fn open(&self) -> Arc<dyn Sink> {
        connect(&format!("file:{}", self.path().display()), &SinkOptions::default())
            .await
            .expect("the file opens")
    }

    async fn received(&self) -> Vec<Received> {
        let text = std::fs::read_to_string(self.path()).expect("the file is readable while the sink is open");
        assert!(text.is_empty() || text.ends_with('\n'), "a torn last line");
        text.lines().map(parse_line).collect()
    }

    async fn stop(&self) {
        std::fs::rename(self.dir.path().join("here"), self.dir.path().join("away")).expect("moved away");
    }

    async fn start(&self) {
        std::fs::rename(self.dir.path().join("away"), self.dir.path().join("here")).expect("moved back");
    }
}
