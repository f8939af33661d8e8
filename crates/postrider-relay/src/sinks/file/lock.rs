//! The lock beside the file: one relay at a time writes it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use crate::sink::SinkError;

/// Held for the life of the sink. A lock file of its own, so that the data file stays readable and can be rotated.
///
/// The system lets go of the lock when the process ends, however it ends; the lock file stays and means nothing by itself.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
}

/// The lock file of `path`: the same name with `.lock` behind it.
fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    PathBuf::from(name)
}

impl Lock {
    /// Takes the lock of `path` or says who has it.
    ///
    /// # Errors
    /// [`SinkError::Operator`]: somebody else holds it (with pid and instance), or the lock file cannot be used.
    pub(super) fn take(path: &Path, instance: &str) -> Result<Self, SinkError> {
        let lock = lock_path(path);
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            SinkError::Operator(format!("{}: {what}: {error}", lock.display()))
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock)
            .map_err(|error| failed("the lock file cannot be opened", &error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(SinkError::Operator(format!(
                    "{} is being written by another relay ({}); give this relay another file, or stop the other one",
                    path.display(),
                    holder(&mut file)
                )));
            }
            Err(TryLockError::Error(error)) => return Err(failed("the file system cannot lock it", &error)),
        }
        let note = format!("pid {}, instance {instance}\n", std::process::id());
        // The note is for people; the lock holds without it (for example on a full disk).
        if let Err(error) = file
            .set_len(0)
            .and_then(|()| file.seek(SeekFrom::Start(0)))
            .and_then(|_| file.write_all(note.as_bytes()))
        {
            tracing::warn!(file = %lock.display(), %error, "could not write down who holds the lock");
        }
        Ok(Self { file })
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Err(error) = self.file.set_len(0) {
            tracing::debug!(%error, "could not empty the lock file");
        }
    }
}

/// What the holder has written down.
fn holder(file: &mut File) -> String {
    let mut note = String::new();
    match file.take(256).read_to_string(&mut note) {
        Ok(_) if !note.trim().is_empty() => note.trim().to_owned(),
        _ => "it has left no name".to_owned(),
    }
}
