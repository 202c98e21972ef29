//! Single accesses to memory that a guest writes at the same time.
//!
//! They are volatile, so that the compiler neither repeats a read (the value that was checked must be the
//! value that is used) nor invents one. Little-endian as virtio 1.3 §1.4 requires.

use std::sync::atomic::{AtomicU16, Ordering};

use crate::descriptor::DescriptorCopy;

/// A `u64` at any address: one plain load on common machines, never a fault.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned(u64);

/// Copies a descriptor once.
///
/// # Safety
/// 16 bytes at `at` must be mapped, at any alignment.
#[inline]
pub(crate) unsafe fn descriptor(at: *const u8) -> DescriptorCopy {
    let words = at.cast::<Unaligned>();
    // SAFETY: mapped by the caller's promise; the type has no alignment and no invalid values.
    let (addr, rest) = unsafe { (words.read_volatile(), words.add(1).read_volatile()) };
    DescriptorCopy::from_words(u64::from_le(addr.0), u64::from_le(rest.0))
}

/// Copies 16 bytes once.
///
/// # Safety
/// 16 bytes at `at` must be mapped, at any alignment.
#[inline]
pub(crate) unsafe fn bytes_16(at: *const u8) -> [u8; 16] {
    let words = at.cast::<Unaligned>();
    // SAFETY: mapped by the caller's promise; the type has no alignment and no invalid values.
    let (low, high) = unsafe { (words.read_volatile(), words.add(1).read_volatile()) };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&low.0.to_ne_bytes());
    bytes[8..].copy_from_slice(&high.0.to_ne_bytes());
    bytes
}

/// Reads a byte.
///
/// # Safety
/// `at` must be mapped.
#[inline]
pub(crate) unsafe fn read_u8(at: *const u8) -> u8 {
    // SAFETY: the caller's promise.
    unsafe { at.read_volatile() }
}

/// Writes a byte.
///
/// # Safety
/// `at` must be mapped.
#[inline]
pub(crate) unsafe fn write_u8(at: *mut u8, value: u8) {
    // SAFETY: the caller's promise.
    unsafe { at.write_volatile(value) };
    written();
}

/// Reads a `u64`.
///
/// # Safety
/// `at` must be mapped and a multiple of eight.
#[inline]
pub(crate) unsafe fn read_u64(at: *const u8) -> u64 {
    // SAFETY: the caller's promise.
    u64::from_le(unsafe { at.cast::<u64>().read_volatile() })
}

/// Writes a `u64`.
///
/// # Safety
/// `at` must be mapped and a multiple of eight.
#[inline]
pub(crate) unsafe fn write_u64(at: *mut u8, value: u64) {
    // SAFETY: the caller's promise.
    unsafe { at.cast::<u64>().write_volatile(value.to_le()) };
    written();
}

/// Reads a `u16`.
///
/// # Safety
/// `at` must be mapped and even.
#[inline]
pub(crate) unsafe fn read_u16(at: *const u8) -> u16 {
    // SAFETY: the caller's promise.
    u16::from_le(unsafe { at.cast::<u16>().read_volatile() })
}

/// Writes a `u16`.
///
/// # Safety
/// `at` must be mapped and even.
#[inline]
pub(crate) unsafe fn write_u16(at: *mut u8, value: u16) {
    // SAFETY: the caller's promise.
    unsafe { at.cast::<u16>().write_volatile(value.to_le()) };
    written();
}

/// Writes a `u32`.
///
/// # Safety
/// `at` must be mapped and a multiple of four.
#[inline]
pub(crate) unsafe fn write_u32(at: *mut u8, value: u32) {
    // SAFETY: the caller's promise.
    unsafe { at.cast::<u32>().write_volatile(value.to_le()) };
    written();
}

/// Loads an index. Acquire: everything that the guest wrote before it is visible afterwards.
///
/// # Safety
/// `at` must be mapped and even.
#[inline]
pub(crate) unsafe fn load_index(at: *mut u8) -> u16 {
    // SAFETY: the caller's promise; the guest's accesses to an index are single 16-bit accesses too.
    u16::from_le(unsafe { AtomicU16::from_ptr(at.cast()) }.load(Ordering::Acquire))
}

/// Stores an index. Release: everything written before it is visible to a guest that sees it.
///
/// # Safety
/// `at` must be mapped and even.
#[inline]
pub(crate) unsafe fn store_index(at: *mut u8, index: u16) {
    // SAFETY: the caller's promise, as above.
    unsafe { AtomicU16::from_ptr(at.cast()) }.store(index.to_le(), Ordering::Release);
    written();
}

/// Marks the end of a store. Called after each store that outlives this process, so that tests can stop it there.
#[inline(always)]
fn written() {
    #[cfg(test)]
    crate::rig::stop_after_stores();
}

/// Prefetches the cache line at `at`, which may be any address.
#[inline]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint; it neither faults nor counts as a read in the memory model.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetches the cache line at `at` for writing, so that it moves here once instead of twice. Any address is
/// allowed.
#[inline]
pub(crate) fn prefetch_to_write(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that neither faults nor counts as a read in the memory model; processors that lack it
    // treat it as a no-operation.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
