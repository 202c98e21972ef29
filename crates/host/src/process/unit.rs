//! The systemd unit that this process runs in. What a unit forbids looks like a fault of the disk: the remedy is a line of the unit.

use std::env;
use std::error::Error;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::OnceLock;

use cleave_disk::OpenError;
use rustix::io::Errno;
use rustix::process::geteuid;

/// Returns the line about a disk that cannot be opened. Inside of a unit the unit's remedy comes first, because the others treat a disk
/// that is well outside of the unit as faulty.
pub(crate) fn explain(error: &OpenError) -> String {
    match name() {
        Some(unit) => explain_in(unit, error, foreign(error)),
        None => error.to_string(),
    }
}

/// Returns the line about a disk that cannot be opened in `unit`. `foreign`: its image, if that cannot be opened because of its user.
fn explain_in(unit: &str, error: &OpenError, foreign: Option<ForeignImage<'_>>) -> String {
    let told = error.to_string();
    let Some(line) = line(error) else {
        return told;
    };
    let edit = format!("systemctl edit {unit}, [Service] {line}");
    match (told.split_once("; "), foreign) {
        (Some((what, _)), Some(ForeignImage { path, uid })) => {
            format!("{what}; it belongs to user {uid}: chown root:root {path}, or {edit}")
        }
        (Some((what, remedy)), None) => {
            format!("{what}; if the unit {unit} is the reason: {edit}; else {remedy}")
        }
        (None, _) => format!("{told}; if the unit {unit} is the reason: {edit}"),
    }
}

/// An image that belongs to another user than the daemon's.
#[derive(Debug, Clone, Copy)]
struct ForeignImage<'a> {
    path: &'a str,
    uid: u32,
}

/// Returns the image that root may not open because it belongs to another user: without capabilities, modes bind root too.
fn foreign(error: &OpenError) -> Option<ForeignImage<'_>> {
    let (OpenError::NoRead(path) | OpenError::NoWrite(path)) = error else {
        return None;
    };
    let found = fs::metadata(path).ok()?;
    let uid = found.uid();
    // A device gets its user back when it is attached again.
    (geteuid().is_root() && found.is_file() && uid != 0).then_some(ForeignImage { path, uid })
}

/// The name of the unit, without its type.
fn name() -> Option<&'static str> {
    static NAME: OnceLock<Option<String>> = OnceLock::new();
    let name = NAME.get_or_init(|| {
        env::var_os("INVOCATION_ID")?;
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        service_of(&groups).map(str::to_owned)
    });
    name.as_deref()
}

/// The service whose control group this is: `0::/system.slice/system-cleave.slice/cleave@a.service`. A terminal runs below the service
/// of a user's systemd, which forbids nothing.
fn service_of(groups: &str) -> Option<&str> {
    let line = groups.lines().find(|line| line.starts_with("0::"))?;
    line.rsplit('/').next()?.strip_suffix(".service")
}

/// The line of a unit that may permit it.
fn line(error: &OpenError) -> Option<String> {
    match error {
        OpenError::ReadOnlyFileSystem(name) => {
            let folder = Path::new(name).parent()?.display();
            Some(format!("ReadWritePaths={folder}"))
        }
        OpenError::NoRead(name) | OpenError::NoWrite(name) if is_home(Path::new(name)) => {
            Some("ProtectHome=no".to_owned())
        }
        OpenError::NoRead(_) | OpenError::NoWrite(_) => {
            Some("User= or SupplementaryGroups= that may open it".to_owned())
        }
        OpenError::Missing(name) if name.starts_with("/run/") => {
            let folder = Path::new(name).parent()?.display();
            Some(format!("BindPaths={folder}"))
        }
        OpenError::Nbd(_, error) => of_network(error),
        _ => None,
    }
}

/// Returns true for a path that ProtectHome= is about.
pub fn is_home(path: &Path) -> bool {
    ["/home", "/root", "/run/user"]
        .iter()
        .any(|home| path.starts_with(home))
}

/// The line that permits a connection.
fn of_network(error: &(dyn Error + 'static)) -> Option<String> {
    let error = error.source().unwrap_or(error);
    let errno = error
        .downcast_ref::<io::Error>()
        .and_then(Errno::from_io_error)?;
    match errno {
        Errno::AFNOSUPPORT => {
            Some("RestrictAddressFamilies=AF_INET AF_INET6 and IPAddressAllow=SERVER".to_owned())
        }
        Errno::PERM | Errno::ACCESS => Some("IPAddressAllow=SERVER".to_owned()),
        Errno::NOENT => Some("BindReadOnlyPaths= with the folder of that socket".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_the_service_of_the_control_group() {
        let groups = "1:name=systemd:/x\n0::/system.slice/system-cleave.slice/cleave@a.service\n";
        assert_eq!(service_of(groups), Some("cleave@a"));
        assert_eq!(service_of("0::/user.slice/session-1.scope\n"), None);
        let terminal = "0::/user.slice/user@1000.service/app.slice/vte-spawn-1.scope\n";
        assert_eq!(service_of(terminal), None);
        assert_eq!(service_of(""), None);
    }

    /// The file system is mostly writable outside of the unit, and root's image is served without any change of the unit.
    #[test]
    fn the_remedy_of_the_unit_comes_first() {
        let image = "/srv/a.img";
        let anothers = ForeignImage {
            path: image,
            uid: 1000,
        };
        for (error, foreign, wanted) in [
            (
                OpenError::ReadOnlyFileSystem(image.into()),
                None,
                "disk /srv/a.img is on a read-only file system; if the unit cleave@a is the reason: systemctl edit cleave@a, \
                 [Service] ReadWritePaths=/srv; else serve it with --read-only",
            ),
            (
                OpenError::NoWrite(image.into()),
                Some(anothers),
                "no permission to open disk /srv/a.img for reading and writing; it belongs to user 1000: chown root:root \
                 /srv/a.img, or systemctl edit cleave@a, [Service] User= or SupplementaryGroups= that may open it",
            ),
            (
                OpenError::NoRead(image.into()),
                None,
                "no permission to open disk /srv/a.img for reading; if the unit cleave@a is the reason: systemctl edit \
                 cleave@a, [Service] User= or SupplementaryGroups= that may open it; else give this user access",
            ),
            (
                OpenError::WriteProtected(image.into()),
                None,
                "disk /srv/a.img is a write-protected device; serve it with --read-only",
            ),
        ] {
            assert_eq!(explain_in("cleave@a", &error, foreign), wanted);
        }
    }

    #[test]
    fn only_root_is_told_to_take_an_image_of_another_user() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        fs::write(&path, "").unwrap();
        let error = OpenError::NoWrite(path.display().to_string());
        assert!(foreign(&error).is_none());
        // Only root can give a file away.
        if geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            assert_eq!(foreign(&error).unwrap().uid, 65_534);
        }
        assert!(foreign(&OpenError::NoWrite("/dev/null".into())).is_none());
        assert!(foreign(&OpenError::Missing(path.display().to_string())).is_none());
    }

    #[test]
    fn a_line_of_the_unit_fits_what_it_forbids() {
        let home = Path::new("/home").join("a.img").display().to_string();
        let lines = [
            (
                OpenError::ReadOnlyFileSystem("/srv/vm/a.img".into()),
                "ReadWritePaths=/srv/vm",
            ),
            (OpenError::NoWrite(home), "ProtectHome=no"),
            (
                OpenError::NoRead("/srv/a.img".into()),
                "SupplementaryGroups=",
            ),
            (
                OpenError::Missing("/run/x/a.img".into()),
                "BindPaths=/run/x",
            ),
        ];
        for (error, wanted) in lines {
            let line = line(&error).unwrap_or_default();
            assert!(line.contains(wanted), "{error}: {line}");
        }
        assert_eq!(line(&OpenError::Missing("/srv/a.img".into())), None);
    }
}
