//! From an op's guest addresses to host ranges, and which memory the ops in flight refer to.

use std::sync::Arc;

use cleave_blk::{Op, Segment};
use cleave_guest::Memory;

/// Calls `piece` with each host range of the op's memory, in order. `Err`: EFAULT where an address is
/// not mapped, EINVAL where the segments are shorter than the op (our own fault); what came before
/// was reported already.
#[inline]
pub(crate) fn walk(
    memory: &Memory,
    op: &Op<'_>,
    mut piece: impl FnMut(*mut u8, usize),
) -> Result<(), i32> {
    let mut left = op.len_bytes;
    let mut skip = op.skip_bytes;
    for segment in op.segments {
        if left == 0 {
            break;
        }
        let addr = segment
            .addr
            .checked_add(u64::from(skip))
            .ok_or(libc::EFAULT)?;
        let whole = segment.len.checked_sub(skip).ok_or(libc::EINVAL)?;
        let len = u32::try_from(left).map_or(whole, |left| whole.min(left));
        skip = 0;
        if len == 0 {
            continue;
        }
        memory
            .resolve(Segment { addr, len }, &mut piece)
            .map_err(|_unmapped| libc::EFAULT)?;
        left -= u64::from(len);
    }
    if left == 0 { Ok(()) } else { Err(libc::EINVAL) }
}

/// Names the memory that an op was translated in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Generation(u32);

/// The memory that ops are translated in now, and earlier ones that ops in flight still refer to.
/// Counted here, so that an op costs no reference count of the `Arc`.
#[derive(Debug)]
pub(crate) struct Bindings {
    current: Bound,
    earlier: Vec<Bound>,
}

#[derive(Debug)]
struct Bound {
    generation: Generation,
    memory: Arc<Memory>,
    ops: u32,
}

impl Bindings {
    pub(crate) fn new(memory: Arc<Memory>) -> Bindings {
        let current = Bound {
            generation: Generation(0),
            memory,
            ops: 0,
        };
        // Room for a burst of table changes under load; more grow it, off the per-op path.
        Bindings {
            current,
            earlier: Vec::with_capacity(16),
        }
    }

    #[inline]
    pub(crate) fn memory(&self) -> &Memory {
        &self.current.memory
    }

    /// Replaces the memory; the old one is kept for as long as an op refers to it.
    pub(crate) fn bind(&mut self, memory: Arc<Memory>) {
        let generation = Generation(self.current.generation.0.wrapping_add(1));
        let old = std::mem::replace(
            &mut self.current,
            Bound {
                generation,
                memory,
                ops: 0,
            },
        );
        if old.ops > 0 {
            self.earlier.push(old);
        }
    }

    /// An op begins to refer to the current memory.
    #[inline]
    pub(crate) fn acquire(&mut self) -> Generation {
        self.current.ops += 1;
        self.current.generation
    }

    /// An op no longer refers to the memory of `generation`.
    #[inline]
    pub(crate) fn release(&mut self, generation: Generation) {
        if generation == self.current.generation {
            self.current.ops = self.current.ops.saturating_sub(1);
        } else {
            self.release_earlier(generation);
        }
    }

    #[cold]
    fn release_earlier(&mut self, generation: Generation) {
        let Some(at) = self
            .earlier
            .iter()
            .position(|bound| bound.generation == generation)
        else {
            debug_assert!(false, "an op outlived its memory");
            return;
        };
        let bound = &mut self.earlier[at];
        bound.ops = bound.ops.saturating_sub(1);
        if bound.ops == 0 {
            drop(self.earlier.swap_remove(at));
        }
    }

    /// The memory of a generation that an op still refers to.
    pub(crate) fn memory_of(&self, generation: Generation) -> Option<&Memory> {
        std::iter::once(&self.current)
            .chain(&self.earlier)
            .find(|bound| bound.generation == generation)
            .map(|bound| &*bound.memory)
    }

    /// Whether a page of that memory was lost, so that what was read from it may be zeroes.
    pub(crate) fn is_lost(&self, generation: Generation) -> bool {
        self.memory_of(generation).is_none_or(Memory::is_lost)
    }

    /// Keeps everything mapped for ever: the kernel may still write to it.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(Arc::clone(&self.current.memory));
        std::mem::forget(std::mem::take(&mut self.earlier));
    }

    /// No op refers to an earlier memory.
    pub(crate) fn is_settled(&self) -> bool {
        self.earlier.is_empty()
    }
}
