//! The result of a bench: raw lines, the machine they were measured on, figures, and a page that shows them. Everything
//! that is drawn is drawn from the raw lines alone, so that `cleave-lab report` can draw it again. The result of a probe is
//! drawn from its JSON.

mod figure;
mod page;
mod probe;
pub(crate) mod quoted;
mod rounds;
mod verdict;
mod view;

use std::path::{Path, PathBuf};

use cleave_chart::svg;
use cleave_rig::{At, Result};

use crate::run_folder::RecordedRun;
use view::Section;

/// Returns the sections that the page shows of a run. A suite without lines has no section.
fn sections(run: &RecordedRun) -> Vec<Section> {
    let views = view::SECTIONS.iter();
    views.filter_map(|view| view.section(run)).collect()
}

/// Draws what the paths name: runs, which are folders, side by side, and the result of a probe, which is a file, by itself.
/// Returns the page and the figures.
pub(crate) fn draw_all(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let (probes, folders): (Vec<_>, Vec<_>) =
        paths.iter().cloned().partition(|path| path.is_file());
    let runs = folders.iter().flat_map(|folder| runs_in(folder));
    let runs: Vec<PathBuf> = runs.collect();
    let page = (!runs.is_empty()).then(|| draw(&runs));
    let figures = probes.iter().map(|file| probe::draw(file));
    page.into_iter().chain(figures).collect()
}

/// Returns the runs that `cleave-lab run` left in a folder, or the folder itself.
fn runs_in(folder: &Path) -> Vec<PathBuf> {
    let runs = ["bench", "guest", "run/bench", "run/guest"].map(|name| folder.join(name));
    let is_run = |folder: &PathBuf| folder.join("results.jsonl").is_file();
    let own = folder.to_owned();
    let found = match is_run(&own) {
        true => Vec::new(),
        false => runs.into_iter().filter(is_run).collect(),
    };
    if found.is_empty() { vec![own] } else { found }
}

/// Draws recorded runs side by side: the figures as files beside each run's raw data, and one page in the first folder,
/// which is returned.
pub(crate) fn draw(folders: &[PathBuf]) -> Result<PathBuf> {
    let first = folders.first().ok_or("name the folder of a run")?;
    let runs = folders.iter().map(|folder| RecordedRun::read(folder));
    let runs = runs.collect::<Result<Vec<RecordedRun>>>()?;
    let drawn: Vec<Vec<Section>> = runs.iter().map(sections).collect();
    for (run, sections) in runs.iter().zip(&drawn) {
        keep_figures(run, sections)?;
    }
    let page = first.join("report.html");
    std::fs::write(&page, page::html(&runs, &drawn)).at(&page)?;
    Ok(page)
}

/// The verdicts of a run, for the terminal.
pub(crate) fn print_verdicts(folder: &Path) -> Result {
    for section in sections(&RecordedRun::read(folder)?) {
        for verdict in section.verdicts {
            println!("{verdict}");
        }
    }
    Ok(())
}

/// Writes the figures as files. One of an earlier run does not stay where the suite was disturbed.
fn keep_figures(run: &RecordedRun, sections: &[Section]) -> Result {
    let folder = run.folder.join("figures");
    std::fs::create_dir_all(&folder).at(&folder)?;
    for section in sections {
        for figure in &section.figures {
            let path = folder.join(format!("{}.svg", figure.name));
            match run.is_disturbed(&section.id) {
                false => std::fs::write(&path, svg(figure)).at(&path)?,
                true if path.exists() => std::fs::remove_file(&path).at(&path)?,
                true => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::verdict::Standing;
    use super::*;
    use crate::run_folder::{DISTURBED, Run};

    #[test]
    fn a_folder_stands_for_the_runs_in_it() {
        let folder = std::env::temp_dir().join(format!("cleave-runs-{}", std::process::id()));
        let guest = folder.join("run/guest");
        std::fs::create_dir_all(&guest).unwrap();
        let one = |folder: &Path| vec![folder.to_owned()];
        assert_eq!(runs_in(&folder), one(&folder), "refused by its own name");
        std::fs::write(guest.join("results.jsonl"), "").unwrap();
        assert_eq!(runs_in(&folder), one(&guest));
        assert_eq!(runs_in(&guest), one(&guest));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_disturbed_suite_is_not_judged_and_leaves_no_figure() {
        let folder = std::env::temp_dir().join(format!("xtask-report-{}", std::process::id()));
        let figure = folder.join("figures/t1-transport.svg");
        for is_disturbed in [false, true] {
            let mut run = Run::create(&folder, &json!({}), json!({})).unwrap();
            for round in 1..=5 {
                for (subject, iops) in [("qemu-storage-daemon", 1.0), ("cleave adaptive", 9.0)] {
                    let line = json!({
                        "round": round, "point": "depth 1, driver sleeps", "subject": subject,
                        "result": { "iops": iops, "daemon_cpu_us": 1.0 },
                    });
                    run.note("transport", &line).unwrap();
                }
            }
            if is_disturbed {
                run.warn("transport", &format!("{DISTURBED}: by others"))
                    .unwrap();
            }
            run.finish().unwrap();
            draw(std::slice::from_ref(&folder)).unwrap();
            let sections = sections(&RecordedRun::read(&folder).unwrap());
            let verdicts = sections.iter().flat_map(|section| &section.verdicts);
            let is_passed = verdicts
                .map(|row| row.standing())
                .any(|standing| standing == Standing::Pass);
            assert_eq!(is_passed, !is_disturbed);
            assert_eq!(figure.exists(), !is_disturbed);
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
