//! One QEMU process, and the conversation with what boots in it.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::step::pinned;

/// How guest instructions are run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accelerator {
    Kvm,
    Tcg,
}

impl Accelerator {
    /// As it stands in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }

    fn arguments(self) -> [&'static str; 4] {
        match self {
            Accelerator::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Accelerator::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }
}

/// What a machine boots.
pub(crate) enum Boot<'a> {
    Linux {
        kernel: &'a Path,
        initramfs: &'a Path,
        /// For the kernel's command line.
        parameters: &'a str,
    },
    /// The firmware loads the disk's first sector.
    Disk,
}

/// How a machine is put together.
pub(crate) struct MachineSpec<'a> {
    pub(crate) accelerator: Accelerator,
    pub(crate) cpus: u32,
    /// Further words for QEMU: the disks and what they hang on.
    pub(crate) devices: Vec<String>,
    /// The CPU that the process starts on, where it is pinned; threads are moved later.
    pub(crate) pinned_to: Option<&'a str>,
    pub(crate) boot: Boot<'a>,
    /// Everything that the guest prints.
    pub(crate) log: PathBuf,
    /// From start to end, whatever happens.
    pub(crate) limit: Duration,
}

pub(crate) const QEMU: &str = "qemu-system-x86_64";

/// QEMU's words for a disk that a daemon serves on `socket`; `id` tells several apart.
pub(crate) fn vhost_user_disk(id: &str, socket: &Path, vrings: u32) -> Vec<String> {
    vec![
        "-chardev".to_owned(),
        format!("socket,id={id},path={}", socket.display()),
        "-device".to_owned(),
        format!("vhost-user-blk-pci,chardev={id},num-queues={vrings},queue-size=256"),
    ]
}

/// QEMU's words for two disks of its own whose drivers can poll, given queues for that: an NVMe drive, and a
/// virtio one with a queue to spare.
pub(crate) fn pollable_disks(nvme: &Path, virtio: &Path) -> Vec<String> {
    let drive = |id: &str, image: &Path| {
        let file = image.display();
        format!("file={file},if=none,id={id},format=raw,discard=unmap")
    };
    let words = [
        ("-drive", drive("first", nvme)),
        ("-device", "nvme,drive=first,serial=polled".to_owned()),
        ("-drive", drive("second", virtio)),
        (
            "-device",
            "virtio-blk-pci,drive=second,num-queues=2".to_owned(),
        ),
    ];
    let words = words.into_iter();
    words
        .flat_map(|(option, value)| [option.to_owned(), value])
        .collect()
}

/// A check that the guest made: its name, and what was wrong.
pub(crate) type Check = (String, Result<(), String>);

/// A running machine; killed when dropped.
pub(crate) struct Machine {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    log: PathBuf,
    deadline: Instant,
    checks: Vec<Check>,
}

/// A line that the guest means for us.
#[derive(Debug, PartialEq)]
enum Word {
    Checked(Check),
    Mark(String),
    End,
}

impl Machine {
    pub(crate) fn start(spec: &MachineSpec<'_>) -> Result<Machine, String> {
        let mut command = match spec.pinned_to {
            None => Command::new(QEMU),
            Some(cpu) => pinned(cpu, QEMU),
        };
        command.args(arguments(spec));
        Machine::run(command, &spec.log, spec.limit)
    }

    /// A command whose standard input and output are the guest's console.
    pub(crate) fn run(
        mut command: Command,
        log: &Path,
        limit: Duration,
    ) -> Result<Machine, String> {
        let create = |path: &Path| {
            File::create(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let complaints = create(&log.with_extension("qemu"))?;
        let console = create(log)?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(complaints)
            .spawn()
            .map_err(|error| format!("QEMU: {error}"))?;
        let (input, output) = match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => (input, output),
            _ => return Err("QEMU has no serial line".to_owned()),
        };
        let (to, lines) = channel();
        std::thread::spawn(move || copy_lines(BufReader::new(output), console, &to));
        Ok(Machine {
            child,
            input,
            lines,
            log: log.to_owned(),
            deadline: Instant::now() + limit,
            checks: Vec::new(),
        })
    }

    /// Waits for a mark; gives the values behind it.
    pub(crate) fn expect(&mut self, mark: &str) -> Result<String, String> {
        loop {
            match self.next()? {
                Word::Checked(check) => self.checks.push(check),
                Word::Mark(found) => {
                    let (name, values) = found.split_once(' ').unwrap_or((&found, ""));
                    if name == mark {
                        return Ok(values.to_owned());
                    }
                    return Err(self.explain(&format!("came to `{name}`, not to `{mark}`")));
                }
                Word::End => return Err(self.explain(&format!("ended before `{mark}`"))),
            }
        }
    }

    /// Waits until the script has ended and the machine is off; gives all checks since the start.
    pub(crate) fn finish(mut self) -> Result<Vec<Check>, String> {
        loop {
            match self.next()? {
                Word::Checked(check) => self.checks.push(check),
                Word::Mark(mark) => return Err(self.explain(&format!("stopped at `{mark}`"))),
                Word::End => break,
            }
        }
        while self
            .child
            .try_wait()
            .map_err(|error| error.to_string())?
            .is_none()
        {
            if Instant::now() > self.deadline {
                return Err(self.explain("did not power off"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(std::mem::take(&mut self.checks))
    }

    /// Waits for the next mark, whatever it is: its name, and the values behind it. None at the script's end.
    pub(crate) fn mark(&mut self) -> Result<Option<(String, String)>, String> {
        loop {
            match self.next()? {
                Word::Checked(check) => self.checks.push(check),
                Word::Mark(found) => {
                    let (name, values) = found.split_once(' ').unwrap_or((&found, ""));
                    return Ok(Some((name.to_owned(), values.to_owned())));
                }
                Word::End => return Ok(None),
            }
        }
    }

    /// Answers a guest that waits.
    pub(crate) fn answer(&mut self) -> Result<(), String> {
        self.say("go\n")
    }

    /// Types whole lines on the console.
    pub(crate) fn say(&mut self, lines: &str) -> Result<(), String> {
        let sent = self
            .input
            .write_all(lines.as_bytes())
            .and_then(|()| self.input.flush());
        sent.map_err(|error| self.explain(&format!("takes no answer: {error}")))
    }

    /// From now on, instead of what was left.
    pub(crate) fn allow(&mut self, limit: Duration) {
        self.deadline = Instant::now() + limit;
    }

    /// QEMU's process.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, as a crash of the frontend; gives the checks so far.
    pub(crate) fn kill(mut self) -> Result<Vec<Check>, String> {
        self.child
            .kill()
            .and_then(|()| self.child.wait())
            .map_err(|error| error.to_string())?;
        Ok(std::mem::take(&mut self.checks))
    }

    /// Waits for a piece of plain text, as a boot sector prints it.
    pub(crate) fn expect_text(&mut self, text: &str) -> Result<(), String> {
        while !self.line()?.contains(text) {}
        Ok(())
    }

    fn next(&mut self) -> Result<Word, String> {
        loop {
            if let Some(word) = word_in(&self.line()?) {
                return Ok(word);
            }
        }
    }

    fn line(&mut self) -> Result<String, String> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.lines.recv_timeout(left).map_err(|error| {
            self.explain(match error {
                RecvTimeoutError::Timeout => "did not answer in time",
                RecvTimeoutError::Disconnected => "went off too early",
            })
        })
    }

    /// A sentence for the report, with the checks that failed and the end of what was printed.
    fn explain(&self, what: &str) -> String {
        let mut text = format!("the guest {what}");
        for (name, result) in &self.checks {
            if let Err(why) = result {
                text.push_str(&format!("\n  {name}: {why}"));
            }
        }
        for log in [self.log.clone(), self.log.with_extension("qemu")] {
            let content = std::fs::read(&log).unwrap_or_default();
            let content = String::from_utf8_lossy(&content);
            let lines: Vec<&str> = content.lines().collect();
            text.push_str(&format!("\n--- end of {}", log.display()));
            for line in lines.iter().skip(lines.len().saturating_sub(15)) {
                text.push_str(&format!("\n{line}"));
            }
        }
        text
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Already ended, or ending: either way nothing more can be done about it here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn arguments(spec: &MachineSpec<'_>) -> Vec<String> {
    // share=on: the daemon maps the guest's memory; private memory would give it a copy.
    let fixed = "-nodefaults -no-user-config -display none -vga none -nic none -monitor none \
                 -serial stdio -machine q35,memory-backend=mem -m 512M \
                 -object memory-backend-memfd,id=mem,size=512M,share=on";
    let mut words: Vec<String> = fixed.split_whitespace().map(str::to_owned).collect();
    words.extend(spec.accelerator.arguments().map(str::to_owned));
    words.extend(["-smp".to_owned(), spec.cpus.to_string()]);
    words.extend(spec.devices.iter().cloned());
    if let Boot::Linux {
        kernel,
        initramfs,
        parameters,
    } = spec.boot
    {
        let console = format!("console=ttyS0 quiet loglevel=1 panic=-1 nokaslr {parameters}");
        for word in ["-kernel", &kernel.to_string_lossy(), "-initrd"] {
            words.push(word.to_owned());
        }
        words.push(initramfs.to_string_lossy().into_owned());
        words.extend(["-append".to_owned(), console]);
    }
    words
}

fn copy_lines(mut from: impl BufRead, mut log: File, to: &Sender<String>) {
    let mut line = Vec::new();
    while from
        .read_until(b'\n', &mut line)
        .is_ok_and(|length| length > 0)
    {
        // A full disk loses the log, not the test; and nobody listens any more when a test is over.
        let _ = log.write_all(&line);
        let _ = to.send(String::from_utf8_lossy(&line).trim_end().to_owned());
        line.clear();
    }
}

/// What a line says to us; the kernel may have printed something before it.
fn word_in(line: &str) -> Option<Word> {
    let at = line.find("CLEAVE-")?;
    let (kind, rest) = line[at..].split_once(' ').unwrap_or((&line[at..], ""));
    match kind {
        "CLEAVE-END" => Some(Word::End),
        "CLEAVE-MARK" => Some(Word::Mark(rest.to_owned())),
        "CLEAVE-TEST" => {
            let (name, verdict) = rest
                .split_once(' ')
                .unwrap_or((rest, "FAIL without verdict"));
            let result = match verdict.split_once(' ').unwrap_or((verdict, "")) {
                ("ok", _) => Ok(()),
                (_, why) => Err(why.to_owned()),
            };
            Some(Word::Checked((name.to_owned(), result)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_guest_are_understood_and_others_passed_over() {
        let table = [
            ("CLEAVE-END", Some(Word::End)),
            (
                "CLEAVE-MARK before-trim 1 2",
                Some(Word::Mark("before-trim 1 2".into())),
            ),
            (
                "CLEAVE-TEST size ok",
                Some(Word::Checked(("size".into(), Ok(())))),
            ),
            (
                "[ 1.0] hmCLEAVE-TEST a ok",
                Some(Word::Checked(("a".into(), Ok(())))),
            ),
            (
                "CLEAVE-TEST size FAIL expected '1', found '2'",
                Some(Word::Checked((
                    "size".into(),
                    Err("expected '1', found '2'".into()),
                ))),
            ),
            ("[    1.234] Linux version 6.1", None),
            ("go", None),
        ];
        for (line, word) in table {
            assert_eq!(word_in(line), word, "{line}");
        }
    }

    #[test]
    fn a_verdict_that_is_cut_off_is_a_failure() {
        let Some(Word::Checked((_, result))) = word_in("CLEAVE-TEST size") else {
            panic!()
        };
        assert!(result.is_err());
    }
}
