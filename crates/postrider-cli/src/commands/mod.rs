//! One file per command: what it asks of the libraries, and how it shows the answer.

pub(crate) mod dead;
pub(crate) mod init;
pub(crate) mod list;
pub(crate) mod run;
pub(crate) mod send;
pub(crate) mod show;
pub(crate) mod status;
