//! An image that is open: its cluster, its lock, its size, and the I/O on it.
//!
//! Unsafe because it calls librbd. The handles are used from many threads, which librbd permits, and closed once, when nothing of
//! ours refers to them any more; librbd then waits for its callbacks.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use libc::iovec;
use rustix::event::{EventfdFlags, eventfd};

use crate::calls::{self, Calls, Info, RadosHandle, RawSetting, calls};
use crate::error::io as failed;
use crate::lock::{ExclusiveLock, Shareable};
use crate::settings::{OwnSettings, RiskySetting};
use crate::{ImagePlace, Inbox, RbdError, inbox, opener};

/// How long the monitors may take to answer when the configuration does not say (librados: five minutes).
const CONNECT_SECONDS: &CStr = c"30";
const MOUNT_SECONDS_DEFAULT: f64 = 300.0;

/// More than callers ever have under way.
const UNBOUNDED: &CStr = c"1099511627776";

/// How long the cluster may take to close an image. It is a few milliseconds where the cluster is well.
const CLOSE_TIME: Duration = Duration::from_secs(2);

/// Most settings of an image; there are about 80.
const SETTINGS_MAX: usize = 1024;

/// The use of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageAccess {
    /// For reading only. Takes no lock.
    Read,
    /// For reading and writing, with the exclusive lock.
    Write,
    /// For reading, and for writing once [`Image::lock`] has taken the exclusive lock.
    WriteOnceLocked,
}

/// What becomes of the space of a range that is zeroed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thickness {
    /// The range's space may be given back.
    Thin,
    /// The range stays allocated.
    Thick,
}

/// An opened image, used by any number of threads.
///
/// Dropping it gives the lock back. A cluster that does not answer may hold that up for at most two seconds.
#[derive(Debug)]
pub struct Image {
    /// There until it closes.
    session: Option<Session>,
    /// Open as long as there is a session.
    handle: Shareable,
    calls: &'static Calls,
    size_bytes: AtomicU64,
    object_bytes: u64,
    is_clone: bool,
    name: String,
    is_locked: AtomicBool,
    changed: OwnedFd,
    is_fenced: AtomicBool,
}

/// An image that closes on a thread of its own. Dropping this waits for it, at most two seconds from the beginning of the closing.
#[derive(Debug)]
pub struct Closing {
    closed: Receiver<()>,
    until: Instant,
}

/// All that is open, dropped in this order.
#[derive(Debug)]
struct Session {
    _image: Opened,
    _pool: Pool,
    _cluster: Cluster,
    /// Boxed because librbd has its address.
    _changed: Box<OwnedFd>,
}

/// A connection to a cluster.
#[derive(Debug)]
struct Cluster {
    calls: &'static Calls,
    handle: RadosHandle,
}

#[derive(Debug)]
struct Pool {
    calls: &'static Calls,
    handle: RadosHandle,
}

#[derive(Debug)]
struct Opened {
    calls: &'static Calls,
    handle: RadosHandle,
    watch: Option<u64>,
}

// SAFETY: librados and librbd permit the use of their handles from any thread, and from several at once.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}
// SAFETY: as above.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}
// SAFETY: as above.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Image {
    /// Connects to the cluster and opens the image. For writing it takes the exclusive lock: if the client that had it is dead,
    /// librbd waits until the cluster knows that (`osd_client_watch_timeout`, 30 s), has the cluster refuse everything that may
    /// still come from that client, and takes the lock. Returns an error if that client is alive and keeps the lock, as we do. One that
    /// took it by writing, as QEMU does, hands it over, and its writes fail from then on.
    ///
    /// The thread on which this happens is that of [`crate::start_opener`], if it was called.
    pub fn open(place: &ImagePlace, access: ImageAccess) -> Result<Image, RbdError> {
        let place = place.clone();
        opener::run(move || Image::open_here(&place, access))
    }

    fn open_here(place: &ImagePlace, access: ImageAccess) -> Result<Image, RbdError> {
        let cluster = Cluster::connect(place)?;
        let pool = cluster.pool(place)?;
        let changed = Box::new(
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?,
        );
        let ours = changed.try_clone()?;
        // Dropped before the eventfd, to which its watch writes, whatever fails below.
        let mut image = pool.open(place, access)?;
        // librbd watches nothing that is open for reading only.
        if access != ImageAccess::Read {
            let harmful = image.harmful_setting();
            if let Some(setting) = harmful.map_err(|error| RbdError::image(place, error))? {
                return Err(RbdError::Harmful(place.image_name(), setting));
            }
            let lock = image.exclusive_lock();
            lock.require(&place.image_name())?;
            if access == ImageAccess::Write {
                lock.take(&place.image_name())?;
            }
            image
                .watch(&changed)
                .map_err(|error| RbdError::image(place, error))?;
        }
        // Now, because it may have changed while the lock was waited for. From here on the watch tells of a change.
        let info = image
            .info()
            .map_err(|error| RbdError::image(place, error))?;
        let is_clone = image
            .is_clone()
            .map_err(|error| RbdError::image(place, error))?;
        Ok(Image {
            handle: Shareable(image.handle),
            calls: image.calls,
            changed: ours,
            session: Some(Session {
                _image: image,
                _pool: pool,
                _cluster: cluster,
                _changed: changed,
            }),
            size_bytes: AtomicU64::new(info.size),
            object_bytes: info.obj_size,
            is_clone,
            name: place.image_name(),
            is_locked: AtomicBool::new(access == ImageAccess::Write),
            is_fenced: AtomicBool::new(false),
        })
    }

    /// Returns the size when it was asked for last.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Asks the cluster for the size, which may take as long as the cluster is away.
    pub fn ask_size_bytes(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY: the image is open.
        let result = unsafe { (self.calls.rbd_get_size)(self.handle.0, &raw mut size) };
        if result < 0 {
            return Err(failed(result));
        }
        self.size_bytes.store(size, Ordering::Relaxed);
        Ok(size)
    }

    /// Reads exactly these bytes and waits for them. For what is read once, such as a superblock; requests use `read`.
    pub fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        match self.read_at(bytes, offset)? {
            read if read == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Reads these bytes, or those before the end of the image, and waits for them. Returns how many they are.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        let (at, len) = (bytes.as_mut_ptr().cast(), bytes.len());
        // SAFETY: the image is open, and librbd fills the bytes before it returns.
        let result = unsafe { (self.calls.rbd_read)(self.handle.0, offset, len, at) };
        moved(result)
    }

    /// Writes these bytes and waits until the cluster has them, or a cache of librbd: see `sync_all`.
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let (at, len) = (bytes.as_ptr().cast(), bytes.len());
        // SAFETY: the image is open, and librbd has taken the bytes when it returns.
        let result = unsafe { (self.calls.rbd_write)(self.handle.0, offset, len, at) };
        match moved(result)? {
            written if written == len => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Waits until everything that was written is durable.
    pub fn sync_all(&self) -> io::Result<()> {
        // SAFETY: the image is open.
        match unsafe { (self.calls.rbd_flush)(self.handle.0) } {
            0.. => Ok(()),
            error => Err(failed(error)),
        }
    }

    /// Returns an eventfd that is written when the image has changed: its size, or another property.
    pub fn changed(&self) -> BorrowedFd<'_> {
        self.changed.as_fd()
    }

    /// Returns the size of the objects in which the cluster keeps it.
    pub fn object_bytes(&self) -> u64 {
        self.object_bytes
    }

    /// Returns true if it shared objects with a parent when it was opened. librbd copies such an object before it changes it.
    pub fn is_clone(&self) -> bool {
        self.is_clone
    }

    /// Returns true if it has the exclusive lock.
    pub fn is_locked(&self) -> bool {
        self.is_locked.load(Ordering::Relaxed)
    }

    /// Takes the exclusive lock, under the conditions of [`Image::open`], and waits as long. Not for an image that is opened
    /// for reading only.
    pub fn lock(&self) -> Result<(), RbdError> {
        let (lock, name) = (self.exclusive_lock(), self.name.clone());
        // The image stays open until the answer is here.
        opener::run(move || lock.take(&name))?;
        self.is_locked.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Gives the exclusive lock back, if it has it. To be called when nothing is in flight.
    pub fn unlock(&self) -> Result<(), RbdError> {
        if self.is_locked() {
            let lock = self.exclusive_lock();
            opener::run(move || Ok(lock.give_back()?))?;
            self.is_locked.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    fn exclusive_lock(&self) -> ExclusiveLock {
        ExclusiveLock {
            calls: self.calls,
            image: self.handle,
        }
    }

    /// Returns true if the cluster refuses this client for good, because another one has taken the lock.
    pub fn is_fenced(&self) -> bool {
        self.is_fenced.load(Ordering::Relaxed)
    }

    /// Notes that it does. `true` the first time.
    pub fn mark_fenced(&self) -> bool {
        !self.is_fenced.swap(true, Ordering::Relaxed)
    }

    /// Reads into `ranges`. `Err`: it was not begun, and nothing will be completed.
    ///
    /// # Safety
    ///
    /// The ranges, and the memory that they name, stay valid until the completion was taken from the inbox.
    pub unsafe fn read(
        &self,
        inbox: &Inbox,
        slot: u16,
        ranges: &[iovec],
        offset: u64,
    ) -> Result<(), i32> {
        let count = count(ranges)?;
        self.begin(inbox, slot, |calls, image, completion| {
            // SAFETY: the caller's promise.
            unsafe { (calls.rbd_aio_readv)(image, ranges.as_ptr(), count, offset, completion) }
        })
    }

    /// Writes from `ranges`, as `read`.
    ///
    /// # Safety
    ///
    /// As for `read`.
    pub unsafe fn write(
        &self,
        inbox: &Inbox,
        slot: u16,
        ranges: &[iovec],
        offset: u64,
    ) -> Result<(), i32> {
        let count = count(ranges)?;
        self.begin(inbox, slot, |calls, image, completion| {
            // SAFETY: the caller's promise.
            unsafe { (calls.rbd_aio_writev)(image, ranges.as_ptr(), count, offset, completion) }
        })
    }

    /// Gives space back.
    pub fn discard(&self, inbox: &Inbox, slot: u16, offset: u64, len: u64) -> Result<(), i32> {
        self.begin(inbox, slot, |calls, image, completion| {
            // SAFETY: the image is open.
            unsafe { (calls.rbd_aio_discard)(image, offset, len, completion) }
        })
    }

    /// Zeroes a range.
    pub fn zero(
        &self,
        inbox: &Inbox,
        slot: u16,
        offset: u64,
        len: u64,
        thickness: Thickness,
    ) -> Result<(), i32> {
        let len = usize::try_from(len).map_err(|_| libc::EINVAL)?;
        let flags = match thickness {
            Thickness::Thin => 0,
            Thickness::Thick => calls::THICK,
        };
        self.begin(inbox, slot, |calls, image, completion| {
            // SAFETY: the image is open.
            unsafe { (calls.rbd_aio_write_zeroes)(image, offset, len, completion, flags, 0) }
        })
    }

    /// Makes everything durable that was completed before.
    pub fn flush(&self, inbox: &Inbox, slot: u16) -> Result<(), i32> {
        self.begin(inbox, slot, |calls, image, completion| {
            // SAFETY: the image is open.
            unsafe { (calls.rbd_aio_flush)(image, completion) }
        })
    }

    fn begin(
        &self,
        inbox: &Inbox,
        slot: u16,
        submit: impl FnOnce(&Calls, RadosHandle, RadosHandle) -> c_int,
    ) -> Result<(), i32> {
        let calls = self.calls;
        let arg = inbox.begin(slot);
        let mut completion = null_mut();
        // SAFETY: `arg` is valid until the callback, which is called once (`Inbox::begin`).
        let made =
            unsafe { (calls.rbd_aio_create_completion)(arg, completed, &raw mut completion) };
        if made < 0 {
            inbox.cancel(slot);
            return Err(made.saturating_neg());
        }
        let result = submit(calls, self.handle.0, completion);
        if result < 0 {
            // SAFETY: the I/O was refused, so nothing else refers to the completion.
            unsafe { (calls.rbd_aio_release)(completion) };
            inbox.cancel(slot);
            return Err(result.saturating_neg());
        }
        Ok(())
    }
}

impl Image {
    /// Begins to close the image, on a thread of its own because librbd waits for the cluster as long as it takes.
    pub fn start_closing(mut self) -> Option<Closing> {
        self.end_session()
    }

    /// Closes the image, which must not be used after that. `None`: there is no thread to wait for.
    fn end_session(&mut self) -> Option<Closing> {
        let session = self.session.take()?;
        let (to, closed) = channel();
        let thread = thread::Builder::new().name("cleave-rbd".to_owned());
        let closing = thread.spawn(move || {
            drop(session);
            let _ = to.send(());
        });
        closing.ok().map(|_| Closing {
            closed,
            until: Instant::now() + CLOSE_TIME,
        })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        drop(self.end_session());
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        let left = self.until.saturating_duration_since(Instant::now());
        if self.closed.recv_timeout(left).is_err() {
            tracing::warn!(
                "the cluster does not answer: an image is not closed, and its lock is free only when the cluster has noticed that"
            );
        }
    }
}

/// Returns how many bytes a transfer moved. librbd cuts it off at the end of the image.
fn moved(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| failed(i32::try_from(result).unwrap_or(-libc::EIO)))
}

/// Completes an I/O. Called by librbd on one of its threads when an I/O is over.
extern "C" fn completed(completion: RadosHandle, arg: *mut c_void) {
    // It was loaded, or there would be no completion.
    let Ok(calls) = calls() else { return };
    // SAFETY: the completion is librbd's, and released once, here.
    let result = unsafe {
        let result = (calls.rbd_aio_get_return_value)(completion);
        (calls.rbd_aio_release)(completion);
        result
    };
    // SAFETY: `arg` is what `Inbox::begin` gave for this I/O.
    unsafe { inbox::complete(arg, result as i64) };
}

/// Notes a change. Called by librbd when somebody has changed the image.
extern "C" fn updated(arg: *mut c_void) {
    // SAFETY: the eventfd lives until the watch has ended (`Opened::drop`).
    let changed = unsafe { &*arg.cast::<OwnedFd>() };
    let _ = rustix::io::write(changed, &1_u64.to_ne_bytes());
}

fn count(ranges: &[iovec]) -> Result<c_int, i32> {
    c_int::try_from(ranges.len()).map_err(|_| libc::EINVAL)
}

fn text(text: &str) -> Result<CString, RbdError> {
    CString::new(text).map_err(|_| RbdError::Text)
}

impl Cluster {
    fn connect(place: &ImagePlace) -> Result<Cluster, RbdError> {
        let calls = calls()?;
        let user = place.user.as_deref().unwrap_or("admin");
        let name = text(&format!("client.{user}"))?;
        let refused = |result| RbdError::Connect(user.to_owned(), failed(result));
        let mut handle = null_mut();
        // SAFETY: the texts are valid during the call.
        let made =
            unsafe { (calls.rados_create2)(&raw mut handle, c"ceph".as_ptr(), name.as_ptr(), 0) };
        if made < 0 {
            return Err(refused(made));
        }
        let cluster = Cluster { calls, handle };
        cluster.configure(place.conf.as_deref())?;
        // SAFETY: the handle is new.
        match unsafe { (calls.rados_connect)(handle) } {
            0.. => Ok(cluster),
            error => Err(refused(error)),
        }
    }

    fn configure(&self, conf: Option<&Path>) -> Result<(), RbdError> {
        let path = conf.map(|path| text(&path.to_string_lossy())).transpose()?;
        let at = path.as_ref().map_or(null(), |path| path.as_ptr());
        // SAFETY: the texts are valid during the calls.
        let read = unsafe { (self.calls.rados_conf_read_file)(self.handle, at) };
        if read < 0 {
            let name = conf.map_or("/etc/ceph/ceph.conf".to_owned(), |path| {
                path.display().to_string()
            });
            return Err(match read.saturating_neg() {
                libc::ENOENT => RbdError::Conf(name, failed(read)),
                _ => RbdError::BadConf(name, failed(read)),
            });
        }
        // `300` or `300.000000`, by the version.
        if self.setting(c"client_mount_timeout").parse() == Ok(MOUNT_SECONDS_DEFAULT) {
            self.set(c"client_mount_timeout", CONNECT_SECONDS);
        }
        // Requests are begun on our thread instead of being passed to another one, which costs a wake-up each. Nothing that they
        // do there waits for the cluster, once librados does not wait for requests to end when there are many: the callers bound
        // what is under way.
        self.set(c"rbd_non_blocking_aio", c"false");
        self.set(c"objecter_inflight_ops", UNBOUNDED);
        self.set(c"objecter_inflight_op_bytes", UNBOUNDED);
        // The cluster must refuse the requests of a dead client before its successor repeats them. The second name is that of version 15.
        self.set(c"rbd_blocklist_on_break_lock", c"true");
        self.set(c"rbd_blacklist_on_break_lock", c"true");
        // For as long as the cluster says. With Ceph 16.2 a lock cannot be taken over if this is set, and elsewhere it may be too short.
        self.set(c"rbd_blocklist_expire_seconds", c"0");
        self.set(c"rbd_blacklist_expire_seconds", c"0");
        // With a time-out librbd fails a write that the cluster may still apply, after newer ones.
        self.set(c"rados_osd_op_timeout", c"0");
        // A cache in this process dies with it, and the guest lives on. So nothing may be completed that only the cache has.
        // `writearound`, the default, caches no reads either.
        match self.setting(c"rbd_cache_policy").as_str() {
            "writearound" => self.set(c"rbd_cache", c"false"),
            _ => {
                self.set(c"rbd_cache_policy", c"writethrough");
                self.set(c"rbd_cache_max_dirty", c"0");
            }
        }
        // Nor may a cache on this host complete it, which after the first flush keeps some of it in memory as well.
        self.set(c"rbd_persistent_cache_mode", c"disabled");
        Ok(())
    }

    /// Returns a setting; empty if this version does not have it.
    fn setting(&self, key: &CStr) -> String {
        let mut value: [c_char; 64] = [0; 64];
        let (at, room) = (value.as_mut_ptr(), value.len());
        // SAFETY: the texts are valid during the call, and the value ends with a zero byte if there is one.
        unsafe {
            match (self.calls.rados_conf_get)(self.handle, key.as_ptr(), at, room) {
                0.. => CStr::from_ptr(value.as_ptr())
                    .to_string_lossy()
                    .into_owned(),
                _ => String::new(),
            }
        }
    }

    /// Sets an option. There is nothing to change if this version does not have it.
    fn set(&self, key: &CStr, value: &CStr) {
        // SAFETY: the texts are valid during the call.
        let _ = unsafe { (self.calls.rados_conf_set)(self.handle, key.as_ptr(), value.as_ptr()) };
    }

    fn pool(&self, place: &ImagePlace) -> Result<Pool, RbdError> {
        let name = text(&place.pool)?;
        let mut handle = null_mut();
        // SAFETY: the cluster is connected, and the text valid during the call.
        let made =
            unsafe { (self.calls.rados_ioctx_create)(self.handle, name.as_ptr(), &raw mut handle) };
        if made < 0 {
            return Err(RbdError::Pool(place.pool.clone(), failed(made)));
        }
        let pool = Pool {
            calls: self.calls,
            handle,
        };
        if let Some(namespace) = &place.namespace {
            let namespace = text(namespace)?;
            // SAFETY: as above.
            unsafe { (self.calls.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) };
        }
        Ok(pool)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: its pool is closed.
        unsafe { (self.calls.rados_shutdown)(self.handle) };
    }
}

impl Pool {
    fn open(&self, place: &ImagePlace, access: ImageAccess) -> Result<Opened, RbdError> {
        let name = text(&place.image)?;
        let snapshot = place.snapshot.as_deref().map(text).transpose()?;
        let snapshot = snapshot.as_ref().map_or(null(), |name| name.as_ptr());
        let open = match access {
            ImageAccess::Read => self.calls.rbd_open_read_only,
            ImageAccess::Write | ImageAccess::WriteOnceLocked => self.calls.rbd_open,
        };
        let mut handle = null_mut();
        // SAFETY: the pool is open, and the texts are valid during the call.
        let opened = unsafe { open(self.handle, name.as_ptr(), &raw mut handle, snapshot) };
        if opened < 0 {
            return Err(RbdError::image(place, opened));
        }
        Ok(Opened {
            calls: self.calls,
            handle,
            watch: None,
        })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: its image is closed.
        unsafe { (self.calls.rados_ioctx_destroy)(self.handle) };
    }
}

impl Opened {
    fn info(&self) -> Result<Info, i32> {
        let mut info = Info::EMPTY;
        // SAFETY: the image is open, and the size is that of the place.
        match unsafe { (self.calls.rbd_stat)(self.handle, &raw mut info, size_of::<Info>()) } {
            0.. => Ok(info),
            error => Err(error),
        }
    }

    fn is_clone(&self) -> Result<bool, i32> {
        let mut shared_bytes = 0;
        // SAFETY: the image is open.
        match unsafe { (self.calls.rbd_get_overlap)(self.handle, &raw mut shared_bytes) } {
            0.. => Ok(shared_bytes > 0),
            error => Err(error),
        }
    }

    /// Returns a setting of the image or of its pool that overrides ours, and with which a guest could lose writes.
    fn harmful_setting(&self) -> Result<Option<RiskySetting>, i32> {
        let mut settings = vec![RawSetting::EMPTY; SETTINGS_MAX];
        let mut count = SETTINGS_MAX as c_int;
        let mut own = OwnSettings::default();
        // SAFETY: there is room for `count` settings, whose texts end with a zero byte and are freed after the look.
        unsafe {
            let at = settings.as_mut_ptr();
            let listed = (self.calls.rbd_config_image_list)(self.handle, at, &raw mut count);
            if listed < 0 {
                return Err(listed);
            }
            for setting in settings.iter().take(usize::try_from(count).unwrap_or(0)) {
                let value = CStr::from_ptr(setting.value).to_bytes();
                own.note(CStr::from_ptr(setting.name).to_bytes(), value);
            }
            (self.calls.rbd_config_image_list_cleanup)(at, count);
        }
        Ok(own.harmful())
    }

    fn exclusive_lock(&self) -> ExclusiveLock {
        ExclusiveLock {
            calls: self.calls,
            image: Shareable(self.handle),
        }
    }

    fn watch(&mut self, changed: &OwnedFd) -> Result<(), i32> {
        let arg = std::ptr::from_ref(changed).cast_mut().cast();
        let mut watch = 0;
        // SAFETY: the eventfd is boxed and outlives the watch: `Image` drops the image first.
        match unsafe { (self.calls.rbd_update_watch)(self.handle, &raw mut watch, updated, arg) } {
            0.. => {
                self.watch = Some(watch);
                Ok(())
            }
            error => Err(error),
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: nothing of ours uses the image any more. Closing waits for what is under way, and gives the lock back.
        unsafe {
            if let Some(watch) = self.watch {
                (self.calls.rbd_update_unwatch)(self.handle, watch);
            }
            (self.calls.rbd_close)(self.handle);
        }
    }
}
