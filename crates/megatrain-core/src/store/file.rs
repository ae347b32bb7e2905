//! Files written from one end to the other through an aligned buffer.
//!
//! Direct writes want a buffer, a length and a place in the file that are multiples of the disk's block. So what has
//! been collected is written in whole blocks, the rest stays at the front of the buffer, and the last block is filled up
//! and cut off again by the file's length.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crc32fast::Hasher;

use crate::disk::{BLOCK, Disk, DiskError, DiskFile};
use crate::error::{Error, Result};
use crate::host::HostSpan;

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

/// A file that is being written.
pub(crate) struct Writer {
    disk: Arc<dyn Disk>,
    file: Box<dyn DiskFile>,
    /// Bytes that all files of the checkpoint take together, for error messages.
    needed: u64,
    offset: u64,
    sums: Sums,
}

impl Writer {
    /// Makes a file that is not there yet.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub(crate) fn create(disk: &Arc<dyn Disk>, path: &Path, needed: u64, chunk_bytes: u64) -> Result<Self> {
        let file = disk.create(path, 0o644).map_err(|error| storage_error(disk.as_ref(), needed, error))?;
        Ok(Self { disk: Arc::clone(disk), file, needed, offset: 0, sums: Sums::new(chunk_bytes) })
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

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(self.offset, bytes).map_err(|error| self.error(error))?;
        self.offset += bytes.len() as u64;
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
            self.file.set_size(size).map_err(|error| self.error(error))?;
        }
        self.file.sync().map_err(|error| self.error(error))?;
        // a checkpoint will not be read again soon, and its pages should not push out anyone's
        self.file.forget_pages();
        Ok((self.file.path().to_owned(), self.sums.finish(), last))
    }

    fn error(&self, error: DiskError) -> Error {
        storage_error(self.disk.as_ref(), self.needed, error)
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

fn storage_error(disk: &dyn Disk, needed: u64, error: DiskError) -> Error {
    let free = disk.free_bytes(error.path.parent().unwrap_or(&error.path)).unwrap_or(0);
    Error::Storage { needed, free, error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RealDisk;

    fn disk() -> Arc<dyn Disk> {
        Arc::new(RealDisk)
    }

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
            let mut writer = Writer::create(&disk(), &path, 1, 10_000).unwrap();
            let (mut at, mut reported) = (0, 0);
            for &piece in *pieces {
                let element = if piece % 8 == 0 && at % 8 == 0 { 8 } else { 1 };
                let read = |start: u64, out: &mut [u8]| {
                    let start = at + start as usize;
                    assert_eq!(start % element, 0);
                    out.copy_from_slice(&data[start..start + out.len()]);
                    Ok(())
                };
                let written = |bytes| {
                    reported += bytes;
                    Ok(())
                };
                writer.append(&mut buffer, piece as u64, element, read, written).unwrap();
                at += piece;
            }
            let (name, sums, last) = writer.finish(&mut buffer).unwrap();
            assert_eq!((name, reported + last), (path.clone(), at as u64));
            let found = std::fs::read(&path).unwrap();
            assert!(found == data[..at]);
            let expected: Vec<u32> = found.chunks(10_000).map(crc32fast::hash).collect();
            assert_eq!(sums, expected);
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_made_is_an_error_with_the_bytes_needed_and_free() {
        let folder = scratch("errors");
        std::fs::write(folder.join("there"), b"x").unwrap();
        for (name, words) in [("there", "File exists"), ("none/file", "No such file")] {
            let error = Writer::create(&disk(), &folder.join(name), 12_345, 4096).err().unwrap().to_string();
            assert!(error.contains(name) && error.contains(words), "{error}");
            assert!(error.contains("12345 bytes were needed"), "{error}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
