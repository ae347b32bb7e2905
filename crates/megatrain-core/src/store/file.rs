//! Files written from one end to the other through an aligned buffer, past the page cache where the file system allows.
//!
//! Direct writes want a buffer, a length and a place in the file that are multiples of the disk's block. So what has
//! been collected is written in whole blocks, the rest stays at the front of the buffer, and the last block is filled up
//! and cut off again by the file's length. Where a file system refuses direct writes, the same calls go through its
//! cache.
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crc32fast::Hasher;

use crate::error::{Error, Result};
use crate::host::HostSpan;

/// A multiple of every disk's block.
const BLOCK: usize = 4096;

/// Collects the bytes of files in page-aligned memory, used for one file after the other.
pub(crate) struct Buffer {
    span: HostSpan,
    filled: usize,
}

impl Buffer {
    /// # Errors
    /// [`Error::HostMemory`] when the system refuses.
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        Ok(Self { span: HostSpan::map(bytes.next_multiple_of(BLOCK).max(2 * BLOCK))?, filled: 0 })
    }

    fn room(&self) -> usize {
        self.span.len() - self.filled
    }
}

/// What a file written so far consists of.
pub(crate) struct Writer {
    file: File,
    path: PathBuf,
    /// Bytes that all files of the checkpoint take together, for error messages.
    needed: u64,
    direct: bool,
    offset: u64,
    sums: Sums,
}

impl Writer {
    /// Makes a file that is not there yet.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn create(path: &Path, needed: u64, chunk_bytes: u64) -> Result<Self> {
        let open =
            |flags: i32| OpenOptions::new().write(true).create_new(true).mode(0o644).custom_flags(flags).open(path);
        let (file, direct) = match open(libc::O_DIRECT) {
            Ok(file) => (Ok(file), true),
            // Some file systems refuse only after they have made the file.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let _ = std::fs::remove_file(path);
                (open(0), false)
            }
            Err(error) => (Err(error), false),
        };
        let file = file.map_err(|source| storage_error(path, needed, source))?;
        Ok(Self { file, path: path.to_owned(), needed, direct, offset: 0, sums: Sums::new(chunk_bytes) })
    }

    /// Appends `bytes` bytes, which `read(start, out)` fills in piece by piece; pieces begin and end at multiples of
    /// `element` bytes. `written` is called with the number of bytes after each write, and may stop it with an error.
    ///
    /// # Errors
    /// [`Error::Storage`], and whatever the closures return.
    pub(crate) fn append(
        &mut self,
        buffer: &mut Buffer,
        bytes: u64,
        element: usize,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
        mut written: impl FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let mut done = 0;
        while done < bytes {
            let most = buffer.room() - buffer.room() % element;
            let len = usize::try_from(bytes - done).map_or(most, |left| left.min(most));
            let mut place = buffer.span.elements_mut::<u8>(buffer.filled as u64, len as u64);
            read(done, &mut place)?;
            drop(place);
            buffer.filled += len;
            done += len as u64;
            if buffer.room() < BLOCK {
                written(self.write_blocks(buffer)?)?;
            }
        }
        Ok(())
    }

    /// Writes whole blocks and moves the rest to the front; returns how many bytes were written.
    fn write_blocks(&mut self, buffer: &mut Buffer) -> Result<u64> {
        let whole = buffer.filled - buffer.filled % BLOCK;
        let mut bytes = buffer.span.elements_mut::<u8>(0, buffer.filled as u64);
        self.sums.add(&bytes[..whole]);
        self.write(&bytes[..whole])?;
        bytes.copy_within(whole.., 0);
        buffer.filled -= whole;
        Ok(whole as u64)
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            match self.file.write_at(bytes, self.offset) {
                Ok(0) => return Err(self.error(io::ErrorKind::WriteZero.into())),
                Ok(len) => {
                    self.offset += len as u64;
                    bytes = &bytes[len..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // This file system wants other blocks, or has stopped in the middle of one.
                Err(error) if self.direct && error.raw_os_error() == Some(libc::EINVAL) => {
                    self.direct = false;
                    through_cache(&self.file).map_err(|e| self.error(e))?;
                }
                Err(error) => return Err(self.error(error)),
            }
        }
        Ok(())
    }

    /// Writes the rest, gives the file its length and waits until it is on the disk. Returns its CRC32 per chunk.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn finish(mut self, buffer: &mut Buffer) -> Result<(PathBuf, Vec<u32>, u64)> {
        let mut last = self.write_blocks(buffer)?;
        let size = self.offset + buffer.filled as u64;
        if buffer.filled > 0 {
            last += buffer.filled as u64;
            let mut block = buffer.span.elements_mut::<u8>(0, BLOCK as u64);
            block[buffer.filled..].fill(0);
            self.sums.add(&block[..buffer.filled]);
            buffer.filled = 0;
            self.write(&block)?;
            self.file.set_len(size).map_err(|e| self.error(e))?;
        }
        self.file.sync_all().map_err(|e| self.error(e))?;
        if !self.direct {
            forget_pages(&self.file);
        }
        Ok((self.path, self.sums.finish(), last))
    }

    fn error(&self, source: io::Error) -> Error {
        storage_error(&self.path, self.needed, source)
    }
}

/// A CRC32 for each chunk of a file.
struct Sums {
    chunk_bytes: u64,
    left: u64,
    hasher: Hasher,
    sums: Vec<u32>,
}

impl Sums {
    fn new(chunk_bytes: u64) -> Self {
        Self { chunk_bytes, left: chunk_bytes, hasher: Hasher::new(), sums: Vec::new() }
    }

    fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let len = usize::try_from(self.left).map_or(bytes.len(), |left| left.min(bytes.len()));
            self.hasher.update(&bytes[..len]);
            bytes = &bytes[len..];
            self.left -= len as u64;
            if self.left == 0 {
                self.next();
            }
        }
    }

    fn next(&mut self) {
        self.sums.push(std::mem::take(&mut self.hasher).finalize());
        self.left = self.chunk_bytes;
    }

    fn finish(mut self) -> Vec<u32> {
        if self.left < self.chunk_bytes {
            self.next();
        }
        self.sums
    }
}

fn storage_error(path: &Path, needed: u64, source: io::Error) -> Error {
    Error::Storage { path: path.to_owned(), needed, free: free_bytes(path.parent().unwrap_or(path)), source }
}

/// What an ordinary user may still write on the disk of `folder`; 0 where the system does not say.
#[allow(clippy::unnecessary_cast, reason = "the fields differ between systems")]
fn free_bytes(folder: &Path) -> u64 {
    let Ok(name) = std::ffi::CString::new(folder.as_os_str().as_bytes()) else { return 0 };
    let mut facts = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the name is a live string that ends in a zero, and the facts have room for what is written there.
    let answer = unsafe { libc::statvfs(name.as_ptr(), facts.as_mut_ptr()) };
    if answer != 0 {
        return 0;
    }
    // SAFETY: the call has succeeded, so it has filled in all of the facts.
    let facts = unsafe { facts.assume_init() };
    facts.f_bavail as u64 * facts.f_frsize as u64
}

/// Takes the file's direct flag back.
fn through_cache(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as the file lives, and the command takes no pointer.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as before; only this file's own flags are changed.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_DIRECT) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A checkpoint will not be read again soon, and its pages should not push out anyone's.
fn forget_pages(file: &File) {
    // SAFETY: the descriptor is open as long as the file lives; the advice changes no byte, and may fail unheard.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("megatrain-file-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn files_hold_what_was_appended_whatever_the_sizes() {
        let folder = scratch("sizes");
        let mut buffer = Buffer::new(4 * BLOCK).unwrap();
        let data: Vec<u8> = (0..100_000u32).map(|i| (i * 7919 % 251) as u8).collect();
        for (round, pieces) in
            [&[0usize][..], &[8], &[4096], &[4088, 16], &[16_384], &[7, 1, 40_000, 8], &[99_992, 8]].iter().enumerate()
        {
            let path = folder.join(format!("{round}"));
            let mut writer = Writer::create(&path, 1, 10_000).unwrap();
            let (mut at, mut told) = (0, 0);
            for &piece in *pieces {
                let element = if piece % 8 == 0 && at % 8 == 0 { 8 } else { 1 };
                let read = |start: u64, out: &mut [u8]| {
                    let start = at + start as usize;
                    assert_eq!(start % element, 0);
                    out.copy_from_slice(&data[start..start + out.len()]);
                    Ok(())
                };
                let written = |bytes| {
                    told += bytes;
                    Ok(())
                };
                writer.append(&mut buffer, piece as u64, element, read, written).unwrap();
                at += piece;
            }
            let (name, sums, last) = writer.finish(&mut buffer).unwrap();
            assert_eq!((name, told + last), (path.clone(), at as u64));
            let found = std::fs::read(&path).unwrap();
            assert!(found == data[..at]);
            let expected: Vec<u32> = found.chunks(10_000).map(crc32fast::hash).collect();
            assert_eq!(sums, expected);
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_written_is_told_with_the_bytes_needed_and_free() {
        let folder = scratch("errors");
        std::fs::write(folder.join("there"), b"x").unwrap();
        for (name, words) in [("there", "File exists"), ("none/file", "No such file")] {
            let error = Writer::create(&folder.join(name), 12_345, 4096).err().unwrap().to_string();
            assert!(error.contains(name) && error.contains(words), "{error}");
            assert!(error.contains("12345 bytes were needed"), "{error}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
