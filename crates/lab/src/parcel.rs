//! The one file that an operator sends back: raw data, page and description of the machine, without names of users and serial
//! numbers.

use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, empty_folder, quietly};

/// Files of a run's folder that are sent. The page has the figures in it.
const FILES: [&str; 3] = ["results.jsonl", "environment.json", "report.html"];

/// Folders whose entries are named after users, or after the serial number or the content of a disk.
const NAMED: [&str; 6] = [
    "/home",
    "/dev/disk/by-id",
    "/dev/disk/by-label",
    "/dev/disk/by-partlabel",
    "/dev/disk/by-partuuid",
    "/dev/disk/by-uuid",
];

/// Packs the runs and the description of a machine into a file in `folder`, whose own path is left out too. Returns the file.
pub(crate) fn pack(folder: &Path, machine: &str, runs: &[PathBuf]) -> Result<PathBuf> {
    let said = quietly(folder, "uname -n", &[])?;
    let is_plain = |letter: &char| letter.is_ascii_alphanumeric() || "-_.".contains(*letter);
    let host: String = said.trim().chars().filter(is_plain).collect();
    let date = quietly(folder, "date -u +%Y%m%d-%H%M%S", &[])?;
    let name = format!("cleave-lab-{host}-{}", date.trim());
    let parcel = folder.join(&name);
    empty_folder(&parcel)?;
    let own = folder.to_string_lossy();
    let write = |to: PathBuf, text: &str| std::fs::write(&to, masked(text, &own)).at(&to);
    write(parcel.join("machine.json"), machine)?;
    for run in runs {
        let to = parcel.join(run.file_name().unwrap_or_default());
        empty_folder(&to)?;
        // A run that ended early may lack some.
        for file in FILES.iter().filter(|file| run.join(file).is_file()) {
            let from = run.join(file);
            let text = std::fs::read_to_string(&from).at(&from)?;
            write(to.join(file), &text)?;
        }
    }
    let file = format!("{name}.tar.gz");
    let line = "tar --owner=0 --group=0 --numeric-owner -czf {} {}";
    let packed = quietly(folder, line, &[&file, &name]);
    std::fs::remove_dir_all(&parcel).at(&parcel)?;
    packed.map(|_| folder.join(file))
}

/// Replaces the folder of the runs and the names in certain folders.
fn masked(text: &str, folder: &str) -> String {
    let text = text.replace(folder, "OUT");
    NAMED.iter().fold(text, |text, named| {
        let named = format!("{named}/");
        let mut parts = text.split(&named);
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |text, part| {
            let is_end = |letter: char| "/\"',:&<\\ ".contains(letter);
            let end = part.find(is_end).unwrap_or(part.len());
            format!("{text}{named}NAME{}", &part[end..])
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_users_and_serial_numbers_are_not_sent() {
        let [home, by_id] = [NAMED[0], NAMED[1]];
        let text = format!(
            r#"{{"words":["--disk","{by_id}/nvme-X_S4EW","--kernel","{home}/alice/k"],"a":"{home}/alice/out/d"}}"#
        );
        let sent = masked(&text, &format!("{home}/alice/out"));
        assert_eq!(
            sent,
            format!(
                r#"{{"words":["--disk","{by_id}/NAME","--kernel","{home}/NAME/k"],"a":"OUT/d"}}"#
            )
        );
    }

    #[test]
    fn a_parcel_holds_what_was_measured_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("cleave-lab-parcel-{}", std::process::id()));
        let run = folder.join("bench");
        empty_folder(&run).unwrap();
        std::fs::write(run.join("results.jsonl"), "{}\n").unwrap();
        std::fs::write(run.join("disk0.log"), "secret").unwrap();
        let file = pack(&folder, "[]", std::slice::from_ref(&run)).unwrap();
        let listed = quietly(&folder, "tar -tzf {}", &[&file.display()]).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let name = name.strip_suffix(".tar.gz").unwrap();
        let mut files: Vec<&str> = listed
            .lines()
            .filter(|line| !line.ends_with('/'))
            .map(|line| line.strip_prefix(name).unwrap())
            .collect();
        files.sort_unstable();
        assert_eq!(files, ["/bench/results.jsonl", "/machine.json"]);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
