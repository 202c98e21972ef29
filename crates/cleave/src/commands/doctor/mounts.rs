//! The systemd unit that would serve an image: which folders it hides from the daemon, or lets it only read.

use std::path::Path;

use cleave_host::is_home;

use super::access;
use super::finding::Finding;
use super::unit::{self, Choice, DiskUnit};

/// These stay as they are under ProtectSystem=strict.
const SPARED: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Checks that a unit may write to an image. Nothing is returned if so, and if there is no such unit.
pub(super) fn check(check: &'static str, image: &Path, unit: &DiskUnit) -> Option<Finding> {
    let image = image.canonicalize().ok()?;
    let (what, lines) = hindrance(&unit.properties, &unit.name, &image)?;
    let found = format!("the unit {} {what} {}", unit.name, image.display());
    let remedy = format!("systemctl edit {}, [Service] {lines}", unit.edited());
    Some(match unit.choice {
        Choice::BySocket => Finding::problem(check, found, remedy),
        Choice::Any => Finding::warning(
            check,
            found,
            format!("if it is to serve this disk, {remedy}"),
        ),
    })
}

/// Returns what a unit with these properties does to an image, or what the node in it does, and the lines that change it.
fn hindrance(properties: &str, unit: &str, image: &Path) -> Option<(&'static str, String)> {
    let is_node = !unit.contains('@');
    let unlisted = is_node.then(|| unlisted(properties, image)).flatten();
    match (withheld(properties, image), unlisted) {
        (Some((what, lines)), Some(more)) => Some((what, format!("{lines} and {more}"))),
        (withheld, None) => withheld,
        (None, Some(more)) => Some(("does not open", more)),
    }
}

/// Returns the line that has the node of the packaged unit open an image, if none of the folders that it is given holds it.
fn unlisted(properties: &str, image: &Path) -> Option<String> {
    let environment = unit::told(properties, "Environment")?;
    let words = environment.split([' ', '"', '=']);
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    let folders = words.windows(2).filter_map(|pair| match pair {
        ["--images", folder] => Some(*folder),
        _ => None,
    });
    let folders: Vec<_> = folders.collect();
    if folders.is_empty() || folders.iter().any(|folder| image.starts_with(folder)) {
        return None;
    }
    let kept = folders.iter().map(|folder| format!("--images {folder} "));
    let kept: String = kept.collect();
    let folder = access::folder(image).display().to_string();
    Some(format!("Environment=\"IMAGES={kept}--images {folder}\""))
}

/// Returns what a unit with these properties does to an image, and the lines that change it.
fn withheld(properties: &str, image: &Path) -> Option<(&'static str, String)> {
    let value = |key: &str| unit::told(properties, key).unwrap_or_default();
    let is_in = |folder: &str| image.starts_with(folder);
    let is_listed = |key: &str| {
        let mut folders = value(key).split_whitespace();
        // A minus allows that the folder is missing; a colon stands before where it is mounted, and before options.
        folders.any(|folder| {
            let folder = folder.trim_start_matches(['-', '+']);
            is_in(folder.split(':').next().unwrap_or_default())
        })
    };
    if value("LoadState") != "loaded" || is_listed("BindPaths") {
        return None;
    }
    let folder = access::folder(image);
    let folder = folder.display();
    let is_writable = is_listed("ReadWritePaths");
    let writable = format!("ReadWritePaths={folder}");
    let is_home = !matches!(value("ProtectHome"), "no" | "") && is_home(image);
    match () {
        () if is_home && value("ProtectHome") == "read-only" => {
            Some(("may only read", format!("ProtectHome=no and {writable}")))
        }
        () if is_home => Some(("does not see", format!("ProtectHome=no and {writable}"))),
        () if value("PrivateTmp") != "no" && (is_in("/tmp") || is_in("/var/tmp")) => {
            Some(("does not see", format!("PrivateTmp=no and {writable}")))
        }
        () if is_listed("TemporaryFileSystem") => {
            Some(("does not see", format!("BindPaths={folder}")))
        }
        () if SPARED.into_iter().any(is_in) || is_writable => None,
        () if value("ProtectSystem") == "strict" => Some(("may only read", writable)),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKAGED: &str = "LoadState=loaded\nProtectSystem=strict\nProtectHome=yes\nPrivateTmp=yes\n\
                            TemporaryFileSystem=/run:ro\nBindPaths=/run/cleave/a:/run/cleave/a:rbind\n\
                            ReadWritePaths=-/var/lib/images /srv/vm\n";

    #[test]
    fn a_unit_withholds_what_is_not_listed() {
        let home = Path::new("/home").join("a.img").display().to_string();
        for (image, wanted) in [
            ("/var/lib/images/a.img", None),
            ("/srv/vm/a.img", None),
            ("/dev/vg/a", None),
            ("/run/cleave/a/a.img", None),
            ("/srv/a.img", Some(("may only read", "ReadWritePaths=/srv"))),
            (
                &home,
                Some(("does not see", "ProtectHome=no and ReadWritePaths=/home")),
            ),
            (
                "/var/tmp/a.img",
                Some(("does not see", "PrivateTmp=no and ReadWritePaths=/var/tmp")),
            ),
            (
                "/run/images/a.img",
                Some(("does not see", "BindPaths=/run/images")),
            ),
        ] {
            let wanted = wanted.map(|(what, lines)| (what, lines.to_owned()));
            assert_eq!(withheld(PACKAGED, Path::new(image)), wanted, "{image}");
        }
        let absent = "LoadState=not-found\nProtectSystem=no\nProtectHome=no\nPrivateTmp=no\n";
        assert_eq!(withheld(absent, Path::new("/srv/a.img")), None);
        let open = absent.replace("not-found", "loaded");
        assert_eq!(withheld(&open, Path::new(&home)), None);
        assert_eq!(withheld("", Path::new("/srv/a.img")), None);
    }

    /// Both have to permit an image: the unit, and the node by its `--images`.
    #[test]
    fn the_node_opens_the_images_of_its_folders_only() {
        let node = format!(
            "{PACKAGED}Environment=\"IMAGES=--images /var/lib/images --images /dev\" OPTIONS=\n"
        );
        let listed = "Environment=\"IMAGES=--images /var/lib/images --images /dev --images /srv";
        let both = format!("ReadWritePaths=/srv and {listed}\"");
        let own = format!("{listed}/vm\"");
        for (unit, image, wanted) in [
            ("cleave", "/srv/a.img", Some(("may only read", both))),
            ("cleave", "/srv/vm/a.img", Some(("does not open", own))),
            ("cleave", "/var/lib/images/a.img", None),
            ("cleave", "/dev/vg/a", None),
            ("cleave@a", "/srv/vm/a.img", None),
        ] {
            let found = hindrance(&node, unit, Path::new(image));
            assert_eq!(found, wanted, "{unit} {image}");
        }
        // Without the option it opens any.
        let found = hindrance(PACKAGED, "cleave", Path::new("/srv/vm/a.img"));
        assert_eq!(found, None);
    }
}
