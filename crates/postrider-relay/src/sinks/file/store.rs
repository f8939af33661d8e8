//! The file itself: append, make durable, repair. All of it blocks.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read as _, Result as IoResult, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::super::line;
use super::lock::Lock;
use super::unavailable;
use crate::sink::SinkError;

/// What became of a batch of lines.
#[derive(Debug)]
pub(super) enum Written {
    /// The first `bytes` of the batch are on disk, whole lines, from `offset` of the file on. Of the rest nothing is in
    /// the file, and `failed` says why.
    Durable { offset: u64, bytes: usize, failed: Option<Error> },
    /// The lines may be in the file, and may be on disk.
    Unknown { error: Error },
}

/// The open file, its lock, and what is known about its end.
#[derive(Debug)]
pub(super) struct Store {
    path: PathBuf,
    file: File,
    /// Everything before this offset is on disk and ends in a newline. The file is not longer, except for `doubtful`.
    end: u64,
    /// Bytes after `end` that were written, but whose `fdatasync` failed. The system may have dropped them while it shows
    /// them still, and a second fdatasync would succeed without them: they have to be written again, at the same place,
    /// so that no reader sees lines vanish.
    doubtful: Vec<u8>,
    _lock: Lock,
}

impl Store {
    /// Locks, opens or creates the file, and cuts off a torn last line.
    pub(super) fn open(path: &Path, instance: &str) -> Result<Self, SinkError> {
        let path = resolve(path).map_err(|error| unavailable(path, &error))?;
        if let Ok(found) = std::fs::metadata(&path)
            && !found.is_file()
        {
            return Err(SinkError::Config(format!("{} is not a regular file", path.display())));
        }
        let lock = Lock::take(&path, instance)?;
        let (file, end) = open_file(&path).map_err(|error| unavailable(&path, &error))?;
        Ok(Self { path, file, end, doubtful: Vec::new(), _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file could be appended to now.
    pub(super) fn check(&mut self) -> IoResult<()> {
        self.settle()
    }

    /// Appends `lines` with as few writes as the system needs, and one `fdatasync`.
    ///
    /// When the disk takes only part of it, the whole lines that fit stay and count; a line cut in two is taken back.
    pub(super) fn append(&mut self, lines: &[u8]) -> Written {
        if let Err(error) = self.settle() {
            return Written::Durable { offset: self.end, bytes: 0, failed: Some(error) };
        }
        let (taken, failed) = write_at(&mut self.file, self.end, lines);
        let whole = lines[..taken].iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
        if whole < taken
            && let Err(error) = self.file.set_len(self.end + whole as u64)
        {
            // The next append finds the file longer than expected, and repairs it.
            tracing::error!(file = %self.path.display(), %error, "a partly written line could not be taken back");
            return Written::Unknown { error };
        }
        let offset = self.end;
        if whole > 0 {
            if let Err(error) = self.file.sync_data() {
                self.doubtful = lines[..whole].to_vec();
                return Written::Unknown { error };
            }
            self.end += whole as u64;
        }
        Written::Durable { offset, bytes: whole, failed }
    }

    /// Makes sure that the open file is the one the path names, that it ends where we think, and that all of it is on disk.
    fn settle(&mut self) -> IoResult<()> {
        let open = self.file.metadata()?;
        match std::fs::metadata(&self.path) {
            Ok(named) if same_file(&named, &open) => {
                if !self.doubtful.is_empty() {
                    self.write_again()
                } else if named.len() != self.end {
                    tracing::warn!(
                        file = %self.path.display(), expected = self.end, found = named.len(),
                        "the sink's file has another length than expected"
                    );
                    self.end = repair(&mut self.file, &self.path)?;
                    Ok(())
                } else {
                    Ok(())
                }
            }
            Ok(_) => self.reopen("replaced"),
            Err(error) if error.kind() == ErrorKind::NotFound => self.reopen("moved away"),
            Err(error) => Err(error),
        }
    }

    /// Writes what an earlier `fdatasync` did not bring to disk once more, through a fresh handle.
    fn write_again(&mut self) -> IoResult<()> {
        let mut file = OpenOptions::new().read(true).write(true).open(&self.path)?;
        let (_, failed) = write_at(&mut file, self.end, &self.doubtful);
        failed.map_or(Ok(()), Err)?;
        file.sync_data()?;
        self.end += self.doubtful.len() as u64;
        self.doubtful.clear();
        self.file = file;
        Ok(())
    }

    /// Goes on with the file that the path names now. The lines in doubt went with the old one; they were reported as unknown.
    fn reopen(&mut self, what: &str) -> IoResult<()> {
        tracing::info!(file = %self.path.display(), "the sink's file was {what}; a new one is begun");
        let (file, end) = open_file(&self.path)?;
        self.file = file;
        self.end = end;
        self.doubtful.clear();
        Ok(())
    }
}

/// Follows links, so that two names of one file share one lock. The file need not exist, its folder must.
fn resolve(path: &Path) -> IoResult<PathBuf> {
    match path.canonicalize() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let name = path.file_name().ok_or_else(|| Error::new(ErrorKind::InvalidInput, "no file name"))?;
            Ok(folder(path).canonicalize()?.join(name))
        }
        other => other,
    }
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn open_file(path: &Path) -> IoResult<(File, u64)> {
    let existed = path.exists();
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    if !existed {
        // Without this, a power cut could take the whole file with its name.
        File::open(folder(path))?.sync_all()?;
    }
    let end = repair(&mut file, path)?;
    // What a crash left in the page cache must be on disk before anything behind it counts as being there.
    file.sync_data()?;
    Ok((file, end))
}

/// Writes `bytes` at `offset`; returns how many were taken and why not all.
fn write_at(file: &mut File, offset: u64, bytes: &[u8]) -> (usize, Option<Error>) {
    if let Err(error) = file.seek(SeekFrom::Start(offset)) {
        return (0, Some(error));
    }
    let mut taken = 0;
    while taken < bytes.len() {
        match file.write(&bytes[taken..]) {
            Ok(0) => return (taken, Some(ErrorKind::WriteZero.into())),
            Ok(n) => taken += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return (taken, Some(error)),
        }
    }
    (taken, None)
}

/// Cuts off a last line without newline that we (or a crash) left behind, and returns the length of what remains.
///
/// # Errors
/// The last line was not written by a relay: somebody's data is not cut.
fn repair(file: &mut File, path: &Path) -> IoResult<u64> {
    let length = file.metadata()?.len();
    let end = last_newline(file, length)?;
    if end == length {
        return Ok(length);
    }
    let mut start = vec![0; line::START.len().min(usize::try_from(length - end).unwrap_or(usize::MAX))];
    file.seek(SeekFrom::Start(end))?;
    file.read_exact(&mut start)?;
    // A power cut can leave zeros where data was to be.
    if !line::START.starts_with(&start) && start.iter().any(|&byte| byte != 0) {
        return Err(Error::new(
            ErrorKind::InvalidData,
            "its last line has no newline and was not written by a relay, so it is not touched",
        ));
    }
    file.set_len(end)?;
    file.sync_data()?;
    tracing::warn!(file = %path.display(), bytes = length - end, "cut off a torn last line; its message is sent again");
    Ok(end)
}

/// The offset behind the last newline, 0 when there is none.
fn last_newline(file: &mut File, length: u64) -> IoResult<u64> {
    const STEP: u64 = 64 << 10;
    let mut buffer = Vec::new();
    let mut to = length;
    while to > 0 {
        let from = to.saturating_sub(STEP);
        file.seek(SeekFrom::Start(from))?;
        buffer.clear();
        (&*file).take(to - from).read_to_end(&mut buffer)?;
        if let Some(newline) = buffer.iter().rposition(|&byte| byte == b'\n') {
            return Ok(from + newline as u64 + 1);
        }
        to = from;
    }
    Ok(0)
}

#[cfg(unix)]
fn same_file(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn same_file(a: &Metadata, b: &Metadata) -> bool {
    // Without a file identity a replaced file shows by its length or its times.
    a.created().ok() == b.created().ok()
}

#[cfg(test)]
impl Store {
    /// As if `fdatasync` had failed behind these lines and the system had dropped them.
    pub(super) fn doubt(&mut self, lines: &[u8]) {
        self.file.set_len(self.end + lines.len() as u64).expect("a test file can grow");
        self.doubtful = lines.to_vec();
    }
}
