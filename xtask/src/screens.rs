//! `cargo xtask screens`: draws what `cleave top` and `cleave doctor` show on a terminal, as figures of README.

use std::fs::{self, File};
use std::io::Write;
use std::iter::repeat_n;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use cleave_rig::daemon::DaemonProcess;
use cleave_rig::{At, Result, built, command, empty_folder, quietly, words};

/// The disks of a node.
const DISKS: [&str; 3] = [
    "db --disk db.img",
    "logs --disk ram:64M --limit iops-total=1000",
    "scratch --disk ram:64M",
];
/// The load on each disk that has one.
const LOADS: [&str; 2] = [
    "--socket run/db/disk.sock --mix 70 --depth 4 --span 16777216 --verify",
    "--socket run/logs/disk.sock --write --sequential --bs 16384 --rate 1500",
];

const TOP: &str = "cleave top --control run/control.sock";
const TOP_SHOWS: &str = "Three disks of a node, sorted by reads a second. The first is selected.";
/// Keys, each with the seconds before it, in which experiments with spinning end: Right, which sorts by the next column; Home,
/// which selects the first disk; and the end.
const TOP_KEYS: &[(u64, &str)] = &[(8, "\x1b[C\x1b[H"), (1, "q")];

const DOCTOR: &str = "cleave doctor --user nobody --socket-path run/db/disk.sock --disk db.img";
const DOCTOR_SHOWS: &str =
    "Findings about a host, a socket and a disk. Long lines are broken between words.";

/// Columns of the terminal.
const COLUMNS: usize = 80;
/// The column in which the sentences of `doctor` begin, and go on in the next line.
const SENTENCES: usize = 23;

/// Width and height of a character, in pixels.
const WIDTH: f64 = 8.43;
const HEIGHT: usize = 18;
const GROUND: &str = "#161b22";
const INK: &str = "#e6edf3";

/// A character, and true if it is shown in reverse.
type Cell = (char, bool);

/// Serves the disks under their loads, and draws both figures.
pub(crate) fn run(root: &Path) -> Result {
    let [cleave, drive] = built::programs(root)?;
    // Always the same folder: `doctor` names it.
    let folder = std::env::temp_dir().join("cleave-screens");
    let sockets = folder.join("run");
    empty_folder(&folder)?;
    fs::create_dir(&sockets).at(&sockets)?;
    let image = folder.join("db.img");
    // As an image should be: what everybody may read is warned of.
    let mut options = File::options();
    let made = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&image);
    let made = made.and_then(|file| file.set_len(64 << 20));
    made.at(&image)?;
    let (program, state) = (cleave.display(), folder.join("state"));
    let line = "{} node --state {} --run {}";
    let node = words(line, &[&program, &state.display(), &sockets.display()]);
    let node = DaemonProcess::start(&node, sockets.join("control.sock"))?;
    for disk in DISKS {
        let add = format!("{{}} disk add {disk} --control run/control.sock");
        quietly(&folder, &add, &[&program])?;
    }
    let load = |load| words(&format!("{{}} {load} --until-eof"), &[&drive.display()]);
    let loads = LOADS.iter().map(|line| start(&folder, &load(line)));
    let loads: Vec<Child> = loads.collect::<Result<_>>()?;
    let draw = |name, line, keys, shows| {
        let figure = root.join("docs/figures").join(name);
        let lines = screen(&shown(&folder, &cleave, line, keys)?)?;
        println!("{}", figure.display());
        fs::write(&figure, svg(line, shows, &lines)).at(&figure)
    };
    draw("top.svg", TOP, TOP_KEYS, TOP_SHOWS)?;
    for load in loads {
        said(load)?;
    }
    draw("doctor.svg", DOCTOR, &[], DOCTOR_SHOWS)?;
    node.stop()?;
    fs::remove_dir_all(&folder).at(&folder)
}

/// Runs a command of the program on a terminal, and returns what it writes there.
fn shown(folder: &Path, cleave: &Path, line: &str, keys: &[(u64, &str)]) -> Result<String> {
    let programs = cleave.parent().unwrap_or(folder).display();
    let shell = format!("stty rows 24 cols {COLUMNS}; exec '{programs}'/{line}");
    let script = words("script --quiet --command {} /dev/null", &[&shell]);
    let mut terminal = start(folder, &script)?;
    for (seconds, key) in keys {
        sleep(Duration::from_secs(*seconds));
        if let Some(keyboard) = &mut terminal.stdin {
            keyboard.write_all(key.as_bytes()).at("script")?;
        }
    }
    said(terminal)
}

/// Starts a program that ends when its input does.
fn start(folder: &Path, line: &[String]) -> Result<Child> {
    let mut command = command(line);
    command.current_dir(folder);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().at(command.get_program())
}

/// Ends a program, and returns what it said.
fn said(program: Child) -> Result<String> {
    let output = program.wait_with_output().at("wait")?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("a program ended with {}", output.status)),
    }
}

/// Returns the lines that a terminal shows at the end: the last picture of `top`, or all that `doctor` printed.
fn screen(written: &str) -> Result<Vec<Vec<Cell>>> {
    // Next, `top` gives the terminal back.
    let pictures = written.split("\x1b[?7h").next().unwrap_or_default();
    let last = pictures.rsplit("\x1b[H\x1b[J").next().unwrap_or_default();
    let (mut lines, mut is_reverse) = (Vec::new(), false);
    for line in last.lines() {
        let mut cells: Vec<Cell> = Vec::new();
        for (at, part) in line.split('\x1b').enumerate() {
            let text = match part.split_once('m') {
                _ if at == 0 => part,
                Some((mode @ ("[7" | "[27"), text)) => {
                    is_reverse = mode == "[7";
                    text
                }
                _ => return Err(format!("cannot draw what ESC {part:?} means")),
            };
            let seen = text.chars().filter(|c| !c.is_control());
            cells.extend(seen.map(|c| (c, is_reverse)));
        }
        while cells.len() > COLUMNS {
            let sentence = &cells[SENTENCES..=COLUMNS];
            let blank = sentence.iter().rposition(|cell| cell.0 == ' ');
            let rest = cells.split_off(blank.map_or(COLUMNS, |at| SENTENCES + at));
            let rest = rest.into_iter().skip_while(|cell| cell.0 == ' ');
            let next = repeat_n((' ', false), SENTENCES).chain(rest).collect();
            lines.push(std::mem::replace(&mut cells, next));
        }
        lines.push(cells);
    }
    Ok(lines)
}

/// Draws the lines of a terminal below the command line. A text is as wide as its cells in every font. Its blanks are kept by
/// `white-space` in browsers, and by `xml:space` in other programs.
fn svg(command: &str, shows: &str, lines: &[Vec<Cell>]) -> String {
    let width = (24.0 + COLUMNS as f64 * WIDTH).round();
    let height = 48 + lines.len() * HEIGHT;
    let fonts = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"
 font-family="{fonts}" font-size="14" xml:space="preserve">
<title>{command}</title>
<desc>{shows}</desc>
<style>text {{ white-space: pre }}</style>
<rect x="0.5" y="0.5" width="{}" height="{}" rx="8" fill="{GROUND}" stroke="#6e7681"/>
"##,
        width - 1.0,
        height - 1,
    );
    let mut text = |column: usize, y: usize, colour: &str, text: &str| {
        let x = 12.0 + column as f64 * WIDTH;
        let length = text.chars().count() as f64 * WIDTH;
        if colour == GROUND {
            let (top, ends) = (y - 13, format!("height=\"{HEIGHT}\" fill=\"{INK}\"/>"));
            svg += &format!("<rect x=\"{x:.2}\" y=\"{top}\" width=\"{length:.2}\" {ends}\n");
        }
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        let place = format!("x=\"{x:.2}\" y=\"{y}\" textLength=\"{length:.2}\"");
        svg += &format!("<text {place} fill=\"{colour}\">{text}</text>\n");
    };
    text(0, 22, "#9da7b3", &format!("$ {command}"));
    for (row, cells) in lines.iter().enumerate() {
        let mut column = 0;
        for run in cells.chunk_by(|one, next| one.1 == next.1) {
            let colour = if run[0].1 { GROUND } else { INK };
            let characters: String = run.iter().map(|cell| cell.0).collect();
            text(column, 49 + row * HEIGHT, colour, &characters);
            column += run.len();
        }
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_picture_is_drawn_in_two_colours() {
        let written = "\x1b[?25l\x1b[H\x1b[Jold\x1b[H\x1b[Ja <\x1b[7mbc\x1b[27m\r\r\n↑\x1b[?7hgone";
        let drawn = svg("cleave top", "Two lines.", &screen(written).unwrap());
        let expected = r##"<title>cleave top</title>
<desc>Two lines.</desc>
<style>text { white-space: pre }</style>
<rect x="0.5" y="0.5" width="697" height="83" rx="8" fill="#161b22" stroke="#6e7681"/>
<text x="12.00" y="22" textLength="101.16" fill="#9da7b3">$ cleave top</text>
<text x="12.00" y="49" textLength="25.29" fill="#e6edf3">a &lt;</text>
<rect x="37.29" y="36" width="16.86" height="18" fill="#e6edf3"/>
<text x="37.29" y="49" textLength="16.86" fill="#161b22">bc</text>
<text x="12.00" y="67" textLength="8.43" fill="#e6edf3">↑</text>
</svg>
"##;
        let at = drawn.find("<title>").unwrap();
        assert_eq!(&drawn[at..], expected);
        assert!(screen("\x1b[31mred").is_err());
    }

    #[test]
    fn a_long_sentence_goes_on_below_its_beginning() {
        let [level, word, longer] = ["warning".to_owned(), "a".repeat(50), "b".repeat(99)];
        let lines = screen(&format!("{level:SENTENCES$}{word} {longer}")).unwrap();
        let widths: Vec<usize> = lines.iter().map(Vec::len).collect();
        assert_eq!(widths, [73, 80, 65]);
        assert_eq!(lines[1][SENTENCES], ('b', false));
    }
}
