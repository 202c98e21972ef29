//! One QEMU process, and the conversation with what boots in it.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::step::{At, pinned};

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

    fn arguments(self) -> &'static str {
        match self {
            Accelerator::Kvm => "-accel kvm -cpu host",
            // QEMU emulates an old CPU faster than one with all features.
            Accelerator::Tcg => "-accel tcg,thread=multi -cpu qemu64",
        }
    }
}

/// Source of the boot.
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

/// QEMU's options for a disk that a daemon serves on `socket`; `id` tells several apart.
pub(crate) fn vhost_user_disk(id: &str, socket: &Path, vrings: u32) -> Vec<String> {
    vec![
        "-chardev".to_owned(),
        format!("socket,id={id},path={}", socket.display()),
        "-device".to_owned(),
        format!("vhost-user-blk-pci,chardev={id},num-queues={vrings},queue-size=256"),
    ]
}

/// QEMU's options for two disks of its own whose drivers can poll, given queues for that: an NVMe drive, and a
/// virtio one with a queue to spare.
pub(crate) fn pollable_disks(nvme: &Path, virtio: &Path) -> Vec<String> {
    let drive = |id: &str, image: &Path| {
        let file = image.display();
        format!("file={file},if=none,id={id},format=raw,discard=unmap")
    };
    let (nvme, virtio) = (drive("first", nvme), drive("second", virtio));
    let words = ["-drive", &nvme, "-device", "nvme,drive=first,serial=polled"];
    let second = [
        "-drive",
        &virtio,
        "-device",
        "virtio-blk-pci,drive=second,num-queues=2",
    ];
    words
        .iter()
        .chain(&second)
        .map(|word| (*word).to_owned())
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

/// A line in which the guest reports to us.
#[derive(Debug, PartialEq)]
enum Word {
    Checked(Check),
    /// Its name, and the values behind it.
    Mark(String, String),
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
        let errors = log.with_extension("qemu");
        let errors = File::create(&errors).at(&errors)?;
        let console = File::create(log).at(log)?;
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors);
        let mut child = command.spawn().at(QEMU)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("QEMU has no serial line".to_owned());
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
        match self.mark()? {
            Some((name, values)) if name == mark => Ok(values),
            Some((name, _)) => Err(self.explain(&format!("came to `{name}`, not to `{mark}`"))),
            None => Err(self.explain(&format!("ended before `{mark}`"))),
        }
    }

    /// Waits until the script has ended and the machine is off; gives all checks since the start.
    pub(crate) fn finish(mut self) -> Result<Vec<Check>, String> {
        if let Some((mark, _)) = self.mark()? {
            return Err(self.explain(&format!("stopped at `{mark}`")));
        }
        while self.child.try_wait().at(QEMU)?.is_none() {
            if Instant::now() > self.deadline {
                return Err(self.explain("did not power off"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(std::mem::take(&mut self.checks))
    }

    /// Waits for the next mark: its name, and the values behind it. None at the script's end.
    pub(crate) fn mark(&mut self) -> Result<Option<(String, String)>, String> {
        loop {
            match word_in(&self.line()?) {
                None => {}
                Some(Word::Checked(check)) => self.checks.push(check),
                Some(Word::Mark(name, values)) => return Ok(Some((name, values))),
                Some(Word::End) => return Ok(None),
            }
        }
    }

    /// Answers a guest that waits.
    pub(crate) fn answer(&mut self) -> Result<(), String> {
        self.say("go\n")
    }

    /// Types whole lines on the console.
    pub(crate) fn say(&mut self, lines: &str) -> Result<(), String> {
        let sent = self.input.write_all(lines.as_bytes());
        let sent = sent.and_then(|()| self.input.flush());
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
            .at(QEMU)?;
        Ok(std::mem::take(&mut self.checks))
    }

    /// Waits for a piece of plain text, as a boot sector prints it.
    pub(crate) fn expect_text(&mut self, text: &str) -> Result<(), String> {
        while !self.line()?.contains(text) {}
        Ok(())
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
            let end = &lines[lines.len().saturating_sub(15)..];
            text.push_str(&format!(
                "\n--- end of {}\n{}",
                log.display(),
                end.join("\n")
            ));
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
    let fixed = format!(
        "-nodefaults -no-user-config -display none -vga none -nic none -monitor none -serial stdio \
         -machine q35,memory-backend=mem -m 512M -object memory-backend-memfd,id=mem,size=512M,share=on \
         {} -smp {}",
        spec.accelerator.arguments(),
        spec.cpus
    );
    let mut words: Vec<String> = fixed.split_whitespace().map(str::to_owned).collect();
    words.extend(spec.devices.iter().cloned());
    if let Boot::Linux {
        kernel,
        initramfs,
        parameters,
    } = spec.boot
    {
        // With an address of its own in each boot: at the old one, TCG would have to drop the code it has translated.
        let console = format!("console=ttyS0 quiet loglevel=1 panic=-1 {parameters}");
        let (kernel, initramfs) = (kernel.to_string_lossy(), initramfs.to_string_lossy());
        let boot = [
            "-kernel", &kernel, "-initrd", &initramfs, "-append", &console,
        ];
        words.extend(boot.map(str::to_owned));
    }
    words
}

fn copy_lines(mut from: impl BufRead, mut log: File, to: &Sender<String>) {
    let mut line = Vec::new();
    while from
        .read_until(b'\n', &mut line)
        .is_ok_and(|length| length > 0)
    {
        // A full disk loses the log, not the test; and after the end of a test there is no receiver.
        let _ = log.write_all(&line);
        let _ = to.send(String::from_utf8_lossy(&line).trim_end().to_owned());
        line.clear();
    }
}

/// The report in a line of the guest; the kernel may have printed something before it.
fn word_in(line: &str) -> Option<Word> {
    let split = |text: &str| {
        let (first, rest) = text.split_once(' ').unwrap_or((text, ""));
        (first.to_owned(), rest.to_owned())
    };
    let (kind, rest) = split(&line[line.find("CLEAVE-")?..]);
    let (name, rest) = split(&rest);
    match kind.as_str() {
        "CLEAVE-END" => Some(Word::End),
        "CLEAVE-MARK" => Some(Word::Mark(name, rest)),
        "CLEAVE-TEST" => {
            let (verdict, why) = split(&rest);
            let result = if verdict == "ok" { Ok(()) } else { Err(why) };
            Some(Word::Checked((name, result)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_the_guest_are_read_and_other_lines_passed_over() {
        let checked = |name: &str, result: Result<(), &str>| {
            Some(Word::Checked((
                name.to_owned(),
                result.map_err(str::to_owned),
            )))
        };
        let mark = Word::Mark("before-trim".to_owned(), "1 2".to_owned());
        let table = [
            ("CLEAVE-END", Some(Word::End)),
            ("CLEAVE-MARK before-trim 1 2", Some(mark)),
            ("CLEAVE-TEST size ok", checked("size", Ok(()))),
            ("[ 1.0] hmCLEAVE-TEST a ok", checked("a", Ok(()))),
            (
                "CLEAVE-TEST size FAIL expected '1'",
                checked("size", Err("expected '1'")),
            ),
            // Cut off.
            ("CLEAVE-TEST size", checked("size", Err(""))),
            ("[    1.234] Linux version 6.1", None),
            ("go", None),
        ];
        for (line, word) in table {
            assert_eq!(word_in(line), word, "{line}");
        }
    }
}
