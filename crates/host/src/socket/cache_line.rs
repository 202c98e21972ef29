//! The line of a lock file about the write cache, which tells the next daemon what its guest relies on.

use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, PoisonError};

use cleave_worker::CacheNote;

/// The cache mode that the line names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheWord {
    /// The guest has the mode that the disk's description says, or there is none.
    AsSet,
    /// The guest has switched its cache off.
    IsOff,
    /// Likewise, and the daemon has ended in order: the file tells nothing else.
    WasOff,
}

impl CacheWord {
    const ALL: [CacheWord; 3] = [CacheWord::AsSet, CacheWord::IsOff, CacheWord::WasOff];
    /// Length of each line: one is written over another, while other threads write after it.
    pub(super) const BYTES: usize = 15;

    pub(super) fn line(self) -> &'static str {
        match self {
            CacheWord::AsSet => "cache: as set \n",
            CacheWord::IsOff => "cache: is off \n",
            CacheWord::WasOff => "cache: was off\n",
        }
    }

    /// Finds the line where it begins this text.
    pub(super) fn first_of(text: &str) -> Option<CacheWord> {
        let mut all = CacheWord::ALL.into_iter();
        all.find(|word| text.starts_with(word.line()))
    }

    /// Finds the line in a lock file, whichever disk that names: the guest's driver is the same.
    pub(super) fn within(text: &str) -> Option<CacheWord> {
        let mut lines = text.split_inclusive('\n').skip(1);
        lines.find_map(CacheWord::first_of)
    }

    pub(super) fn is_off(self) -> bool {
        self != CacheWord::AsSet
    }
}

/// The line in the file of a daemon that serves.
#[derive(Debug)]
pub(super) struct CacheLine {
    /// A description of its own, whose position nobody else uses.
    file: Mutex<File>,
    at: u64,
    /// The path of the file, for messages.
    shown: String,
}

impl CacheLine {
    /// Names the line at this place of a file.
    pub(super) fn new(file: File, at: u64, shown: String) -> CacheLine {
        CacheLine {
            file: Mutex::new(file),
            at,
            shown,
        }
    }
}

fn word_at(file: &File, at: u64) -> io::Result<Option<CacheWord>> {
    let mut bytes = [0; CacheWord::BYTES];
    file.read_exact_at(&mut bytes, at)?;
    Ok(str::from_utf8(&bytes).ok().and_then(CacheWord::first_of))
}

/// Writes a line at this place. A confined thread has no call that does it in one.
pub(super) fn write_word(mut file: &File, at: u64, word: CacheWord) -> io::Result<()> {
    file.seek(io::SeekFrom::Start(at))?;
    file.write_all(word.line().as_bytes())
}

impl CacheNote for CacheLine {
    fn is_off(&self) -> bool {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(word_at(&file, self.at), Ok(Some(word)) if word.is_off())
    }

    fn set_off(&self, is_off: bool) {
        let word = match is_off {
            true => CacheWord::IsOff,
            false => CacheWord::AsSet,
        };
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(word_at(&file, self.at), Ok(found) if found == Some(word)) {
            return;
        }
        if let Err(error) = write_word(&file, self.at, word) {
            let shown = &self.shown;
            tracing::error!(
                "{shown}: cannot be written: the next daemon will not know whether the guest has switched its write cache off: {error}"
            );
        }
    }
}
