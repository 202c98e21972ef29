//! The functions of librados and librbd that are used, found at run time: a host without Ceph needs no package, and the program
//! no library to link with.
//!
//! Unsafe because the types of the functions are declared here, after `rados/librados.h` and `rbd/librbd.h` of Ceph 16, whose ABI
//! has been the same since. The libraries are never unloaded, because their threads never end for certain.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use libc::{iovec, size_t, ssize_t};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::RbdError;

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t` and `rbd_completion_t`.
pub(crate) type RadosHandle = *mut c_void;
pub(crate) type OnCompletion = extern "C" fn(RadosHandle, *mut c_void);
pub(crate) type OnUpdate = extern "C" fn(*mut c_void);

/// RBD_LOCK_MODE_EXCLUSIVE.
pub(crate) const EXCLUSIVE: c_int = 0;
/// RBD_FEATURE_EXCLUSIVE_LOCK.
pub(crate) const FEATURE_LOCK: u64 = 1 << 2;
/// RBD_WRITE_ZEROES_FLAG_THICK_PROVISION.
pub(crate) const THICK: c_int = 1;

/// `rbd_image_info_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Info {
    pub(crate) size: u64,
    pub(crate) obj_size: u64,
    num_objs: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

impl Info {
    pub(crate) const EMPTY: Info = Info {
        size: 0,
        obj_size: 0,
        num_objs: 0,
        order: 0,
        block_name_prefix: [0; 24],
        parent_pool: 0,
        parent_name: [0; 96],
    };
}

/// `rbd_config_option_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawSetting {
    pub(crate) name: *mut c_char,
    pub(crate) value: *mut c_char,
    source: c_int,
}

impl RawSetting {
    pub(crate) const EMPTY: RawSetting = RawSetting {
        name: std::ptr::null_mut(),
        value: std::ptr::null_mut(),
        source: 0,
    };
}

/// Declares the table and how it is filled.
macro_rules! calls {
    ($($library:ident { $($name:ident($($of:ty),*) $(-> $out:ty)?;)* })*) => {
        /// The functions.
        #[derive(Debug)]
        pub(crate) struct Calls {
            $($(pub(crate) $name: unsafe extern "C" fn($($of),*) $(-> $out)?,)*)*
        }

        impl Calls {
            fn find($($library: &Library),*) -> Result<Calls, String> {
                Ok(Calls {
                    $($($name: {
                        let name = stringify!($name);
                        // SAFETY: the type is that of the header; see above.
                        let found = unsafe { $library.get(name.as_bytes()) };
                        *found.map_err(|_| format!("{} has no function {name}", stringify!($library)))?
                    },)*)*
                })
            }
        }
    };
}

calls! {
    librados {
        rados_create2(*mut RadosHandle, *const c_char, *const c_char, u64) -> c_int;
        rados_conf_read_file(RadosHandle, *const c_char) -> c_int;
        rados_conf_get(RadosHandle, *const c_char, *mut c_char, size_t) -> c_int;
        rados_conf_set(RadosHandle, *const c_char, *const c_char) -> c_int;
        rados_connect(RadosHandle) -> c_int;
        rados_shutdown(RadosHandle);
        rados_ioctx_create(RadosHandle, *const c_char, *mut RadosHandle) -> c_int;
        rados_ioctx_set_namespace(RadosHandle, *const c_char);
        rados_ioctx_destroy(RadosHandle);
    }
    librbd {
        rbd_open(RadosHandle, *const c_char, *mut RadosHandle, *const c_char) -> c_int;
        rbd_open_read_only(RadosHandle, *const c_char, *mut RadosHandle, *const c_char) -> c_int;
        rbd_close(RadosHandle) -> c_int;
        rbd_stat(RadosHandle, *mut Info, size_t) -> c_int;
        rbd_get_size(RadosHandle, *mut u64) -> c_int;
        rbd_get_overlap(RadosHandle, *mut u64) -> c_int;
        rbd_config_image_list(RadosHandle, *mut RawSetting, *mut c_int) -> c_int;
        rbd_config_image_list_cleanup(*mut RawSetting, c_int);
        rbd_get_features(RadosHandle, *mut u64) -> c_int;
        rbd_read(RadosHandle, u64, size_t, *mut c_char) -> ssize_t;
        rbd_write(RadosHandle, u64, size_t, *const c_char) -> ssize_t;
        rbd_flush(RadosHandle) -> c_int;
        rbd_update_watch(RadosHandle, *mut u64, OnUpdate, *mut c_void) -> c_int;
        rbd_update_unwatch(RadosHandle, u64) -> c_int;
        rbd_lock_acquire(RadosHandle, c_int) -> c_int;
        rbd_lock_release(RadosHandle) -> c_int;
        rbd_invalidate_cache(RadosHandle) -> c_int;
        rbd_lock_get_owners(RadosHandle, *mut c_int, *mut *mut c_char, *mut size_t) -> c_int;
        rbd_lock_get_owners_cleanup(*mut *mut c_char, size_t);
        rbd_aio_create_completion(*mut c_void, OnCompletion, *mut RadosHandle) -> c_int;
        rbd_aio_get_return_value(RadosHandle) -> ssize_t;
        rbd_aio_release(RadosHandle);
        rbd_aio_readv(RadosHandle, *const iovec, c_int, u64, RadosHandle) -> c_int;
        rbd_aio_writev(RadosHandle, *const iovec, c_int, u64, RadosHandle) -> c_int;
        rbd_aio_discard(RadosHandle, u64, u64, RadosHandle) -> c_int;
        rbd_aio_write_zeroes(RadosHandle, u64, size_t, RadosHandle, c_int, c_int) -> c_int;
        rbd_aio_flush(RadosHandle, RadosHandle) -> c_int;
    }
}

/// Returns the functions, loaded at the first call.
pub(crate) fn calls() -> Result<&'static Calls, RbdError> {
    static CALLS: OnceLock<Result<Calls, String>> = OnceLock::new();
    let loaded = CALLS.get_or_init(load);
    loaded
        .as_ref()
        .map_err(|why| RbdError::Library(why.clone()))
}

fn load() -> Result<Calls, String> {
    let open = |name: &str| {
        // SAFETY: the initialisers of Ceph's libraries need nothing from us.
        let opened = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
        opened.map_err(|error| format!("cannot load {name}: {}", reason(&error)))
    };
    let librados = open("librados.so.2")?;
    let librbd = open("librbd.so.1")?;
    let calls = Calls::find(&librados, &librbd)?;
    std::mem::forget((librados, librbd));
    Ok(calls)
}

/// Returns the loader's own words, without those of the crate around them.
fn reason(error: &libloading::Error) -> String {
    let text = error.to_string();
    text.split_once(": ")
        .map_or(text.clone(), |(_, rest)| rest.to_owned())
}
