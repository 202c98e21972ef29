//! The systemd unit that this process runs in. What a unit forbids looks like a fault of the disk: the remedy is a line of the unit.

use std::env;
use std::error::Error;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use cleave_disk::OpenError;
use rustix::io::Errno;

/// The unit's remedy for a disk that cannot be opened, to follow the error. Nothing outside of a unit.
pub(crate) fn remedy(error: &OpenError) -> String {
    let Some(unit) = name() else {
        return String::new();
    };
    line(error).map_or_else(String::new, |line| {
        format!("; or the unit {unit} forbids it: systemctl edit {unit}, [Service] {line}")
    })
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

/// The service that a list of control groups names: `0::/system.slice/system-cleave.slice/cleave@a.service`.
fn service_of(groups: &str) -> Option<&str> {
    let line = groups.lines().find(|line| line.starts_with("0::"))?;
    line.rsplit('/')
        .find_map(|part| part.strip_suffix(".service"))
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
    fn the_unit_is_the_last_service_of_the_control_group() {
        let groups = "1:name=systemd:/x\n0::/system.slice/system-cleave.slice/cleave@a.service\n";
        assert_eq!(service_of(groups), Some("cleave@a"));
        assert_eq!(service_of("0::/user.slice/session-1.scope\n"), None);
        assert_eq!(service_of(""), None);
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
