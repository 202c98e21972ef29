//! The result of a bench: raw lines, the machine they were measured on, figures, and a page that
//! shows them. Everything that is drawn is drawn from the raw lines alone, so that `cargo xtask report`
//! can draw it again.

pub(crate) mod environment;
mod page;
mod recorded;
pub(crate) mod rounds;
mod run;
pub(crate) mod section;

use std::path::{Path, PathBuf};

pub(crate) use cleave_chart::{self as chart, Spread};

pub(crate) use recorded::Recorded;
pub(crate) use rounds::Rounds;
pub(crate) use run::Run;
pub(crate) use section::{Bar, Section, Table, Verdict};

/// Turns the raw lines of one suite into what the page shows of it.
pub(crate) type Draw = fn(&Recorded) -> Option<Section>;

/// The functions that draw each section, in the order of the page. A suite without lines has no section.
const DRAWN: &[&[Draw]] = &[crate::bench::DRAWN, &[crate::guest_bench::draw::section]];

fn sections(run: &Recorded) -> Vec<Section> {
    let all = DRAWN.iter().flat_map(|draws| draws.iter());
    let mut sections: Vec<Section> = all.filter_map(|draw| draw(run)).collect();
    for section in &mut sections {
        let timed = section.verdicts.iter_mut().filter(|row| !row.is_count);
        for verdict in timed.filter(|_| run.is_disturbed(section.id)) {
            verdict.must = Bar::Published;
            verdict.note = format!("disturbed: not judged. {}", verdict.note);
        }
    }
    sections
}

/// Draws recorded runs side by side: the figures as files beside each run's raw data, and one page in
/// `to`, which is returned.
pub(crate) fn draw(folders: &[PathBuf], to: &Path) -> Result<PathBuf, String> {
    let runs: Vec<Recorded> = folders
        .iter()
        .map(|folder| Recorded::read(folder))
        .collect::<Result<_, _>>()?;
    let mut drawn = Vec::new();
    for run in &runs {
        let sections = sections(run);
        let undisturbed = sections.iter().filter(|one| !run.is_disturbed(one.id));
        keep_figures(&run.folder, undisturbed)?;
        drawn.push(sections);
    }
    let page = to.join("report.html");
    std::fs::write(&page, page::html(&runs, &drawn))
        .map_err(|error| format!("{}: {error}", page.display()))?;
    Ok(page)
}

/// The rows T1 to T12 of a run, for the terminal.
pub(crate) fn print_verdicts(folder: &Path) -> Result<(), String> {
    let run = Recorded::read(folder)?;
    for verdict in sections(&run).iter().flat_map(|section| &section.verdicts) {
        println!("{verdict}");
    }
    Ok(())
}

/// `cargo xtask report DIR…`
pub(crate) fn again(words: &[&str]) -> Result<(), String> {
    let folders: Vec<PathBuf> = words.iter().map(PathBuf::from).collect();
    let Some(first) = folders.first() else {
        return Err("name the folder of a run, or several: cargo xtask report DIR…".to_owned());
    };
    let page = draw(&folders, first)?;
    println!("{}", page.display());
    Ok(())
}

fn keep_figures<'a>(
    folder: &Path,
    sections: impl Iterator<Item = &'a Section>,
) -> Result<(), String> {
    let folder = folder.join("figures");
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for figure in sections.flat_map(|section| &section.figures) {
        let path = folder.join(format!("{}.svg", figure.name));
        std::fs::write(&path, chart::svg(figure))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}
