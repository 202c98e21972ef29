//! One QEMU process, and the conversation with the guest that boots in it.

use std::fmt::Display;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::command::{At, Result, execute, quietly, words};

/// How guest instructions are run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// By the machine's own CPU.
    Kvm,
    /// By QEMU, which translates them.
    Tcg,
}

impl Accelerator {
    /// Returns its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

/// The program that runs guests, where the operator names no other.
pub const QEMU: &str = "qemu-system-x86_64";

/// The option of a chardev that has QEMU connect again. QEMU 9.2 replaced the first by the second and 10.2 removed it; from
/// 9.2 on the help lists the second alone.
const RECONNECT: [&str; 2] = ["reconnect=1", "reconnect-ms=10"];

/// Returns the option that a QEMU knows by which a chardev connects again.
pub fn reconnect(program: &str) -> Result<&'static str> {
    let help = quietly(Path::new("/"), "{} --help", &[&program])?;
    Ok(reconnect_of(&help))
}

fn reconnect_of(help: &str) -> &'static str {
    let [old, new] = RECONNECT;
    match help.contains("[,reconnect=seconds]") {
        true => old,
        false => new,
    }
}

/// QEMU's options for a disk that a daemon serves: an id, which tells several apart, the socket; the id, the number of
/// vrings. Behind each of the two may stand further properties.
pub const VHOST_USER_DISK: &str = "-chardev socket,id={},path={} -device vhost-user-blk-pci,chardev={},queue-size=256,num-queues={}";

/// Returns the command line of a QEMU, with further words: the disks and what they hang on, and the kernel to boot, or else the firmware
/// loads the first disk's first sector.
pub fn qemu(
    program: &str,
    accelerator: Accelerator,
    cpus: u32,
    more: &[Vec<String>],
) -> Vec<String> {
    let accelerator = match accelerator {
        Accelerator::Kvm => "-accel kvm -cpu host",
        // QEMU emulates an old CPU faster than one with all features.
        Accelerator::Tcg => "-accel tcg,thread=multi -cpu qemu64",
    };
    // For a machine that can never have a second CPU, QEMU before 8.1 translates memory barriers to nothing, and the guest loses
    // kicks.
    let most = cpus.max(2);
    // share=on: the daemon maps the guest's memory; private memory would give it a copy.
    let line = format!(
        "{{}} -nodefaults -no-user-config -display none -vga none -nic none -monitor none -serial stdio \
         -machine q35,memory-backend=mem -m 512M -object memory-backend-memfd,id=mem,size=512M,share=on \
         {accelerator} -smp {cpus},maxcpus={most}"
    );
    [words(&line, &[&program]), more.concat()].concat()
}

/// How the report of a machine begins whose QEMU was ended by a signal that nobody sent.
pub const CRASHED: &str = "QEMU crashed";

/// Longest time from the end of the console to that of QEMU, and the pause between two looks.
const END_TIME: Duration = Duration::from_secs(5);
const END_PAUSE: Duration = Duration::from_millis(5);

/// A check that the guest made: its name, and its fault if it found one.
pub type Check = (String, Result);

/// Lists the checks that found something wrong, each on a line of its own.
pub fn failed(checks: &[Check]) -> String {
    let fault = |(name, result): &Check| Some(format!("\n  {name}: {}", result.as_ref().err()?));
    checks.iter().filter_map(fault).collect()
}

/// A running machine; killed when dropped.
pub struct Machine {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    log: PathBuf,
    deadline: Instant,
    checks: Vec<Check>,
}

impl Machine {
    /// Starts a command whose standard input and output are the guest's console. Everything that it prints goes to `log` too.
    /// After `limit` it is late, whatever happens.
    pub fn run(mut command: Command, log: &Path, limit: Duration) -> Result<Machine> {
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

    /// Waits for a mark. Returns the values after it.
    pub fn expect(&mut self, mark: &str) -> Result<String> {
        match self.mark()? {
            Some((name, values)) if name == mark => Ok(values),
            Some((name, _)) => Err(self.explain(&format!("came to `{name}`, not to `{mark}`"))),
            None => Err(self.explain(&format!("ended before `{mark}`"))),
        }
    }

    /// Waits until the machine is off, after the script's end. Returns all checks since the start.
    pub fn off(self) -> Result<Vec<Check>> {
        // The console closes when QEMU ends.
        loop {
            match self.lines.recv_timeout(self.left()) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return self.kill(),
                Err(RecvTimeoutError::Timeout) => return Err(self.explain("did not power off")),
            }
        }
    }

    /// Waits for the next mark. Returns its name and the values after it; `None` at the script's end.
    pub fn mark(&mut self) -> Result<Option<(String, String)>> {
        loop {
            let line = self.line()?;
            match report(&line) {
                Some(("END", ..)) => return Ok(None),
                Some(("MARK", name, values)) => return Ok(Some((name.into(), values.into()))),
                Some(("TEST", name, "ok")) => self.checks.push((name.into(), Ok(()))),
                Some(("TEST", name, why)) => {
                    let why = why.trim_start_matches("FAIL ");
                    self.checks.push((name.into(), Err(why.into())));
                }
                _ => {}
            }
        }
    }

    /// Types whole lines on the console.
    pub fn say(&mut self, lines: &str) -> Result {
        let sent = self.input.write_all(lines.as_bytes());
        let sent = sent.and_then(|()| self.input.flush());
        sent.map_err(|error| self.explain(&format!("does not take an answer: {error}")))
    }

    /// Sets a new time limit, which starts now.
    pub fn allow(&mut self, limit: Duration) {
        self.deadline = Instant::now() + limit;
    }

    /// Returns QEMU's process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Ends it by SIGKILL, as a crash of the frontend. Returns the checks so far.
    pub fn kill(mut self) -> Result<Vec<Check>> {
        Ok(std::mem::take(&mut self.checks))
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn line(&mut self) -> Result<String> {
        let line = self.lines.recv_timeout(self.left());
        line.map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                let why = self.explain("did not answer in time");
                format!("{why}\nQEMU's threads:\n{}", self.threads())
            }
            RecvTimeoutError::Disconnected => {
                let why = self.explain("went off too early");
                match self.crash() {
                    Some(signal) => format!("{CRASHED} by signal {signal}: {why}"),
                    None => why,
                }
            }
        })
    }

    /// Returns the signal that ended QEMU, whose console is closed.
    fn crash(&mut self) -> Option<i32> {
        let until = Instant::now() + END_TIME;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().ok()? {
                return status.signal();
            }
            std::thread::sleep(END_PAUSE);
        }
        None
    }

    /// Returns where QEMU's threads are: a guest that does not answer may be one whose emulator hangs.
    fn threads(&self) -> String {
        let process = self.process().to_string();
        let kernel = format!("grep -s . /proc/{process}/task/*/{{comm,wchan,syscall}}");
        // A debugger says more, where there is one.
        let debugger =
            format!("timeout 60 gdb --batch --pid {process} -ex 'thread apply all backtrace 15'");
        let run = |line: String| {
            let line = ["bash".to_owned(), "-c".to_owned(), line];
            execute(Path::new("/"), &line).unwrap_or_else(|error| error)
        };
        run(kernel) + &run(debugger)
    }

    /// Returns a sentence for the report, with the checks that failed and the end of the logs.
    fn explain(&self, what: &str) -> String {
        let errors = self.log.with_extension("qemu");
        let logs: [&dyn Display; 2] = [&self.log.display(), &errors.display()];
        let ends = quietly(Path::new("/"), "tail -n 15 {} {}", &logs);
        let (failed, ends) = (failed(&self.checks), ends.unwrap_or_default());
        format!("the guest {what}{failed}\n{ends}")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Already ended, or ending: either way nothing more can be done about it here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn copy_lines(mut from: impl BufRead, mut log: File, to: &Sender<String>) {
    let mut line = Vec::new();
    while matches!(from.read_until(b'\n', &mut line), Ok(1..)) {
        // A full disk loses the log, not the test; and after the end of a test there is no receiver.
        let _ = log.write_all(&line);
        let _ = to.send(String::from_utf8_lossy(&line).trim_end().to_owned());
        line.clear();
    }
}

/// Returns kind, name and the rest of a guest's report; the kernel may have printed something before it.
fn report(line: &str) -> Option<(&str, &str, &str)> {
    let split = |text| str::split_once(text, ' ').unwrap_or((text, ""));
    let (kind, rest) = split(line.split_once("CLEAVE-")?.1);
    let (name, rest) = split(rest);
    Some((kind, name, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chardev_connects_again_by_the_option_that_the_help_names() {
        let option = super::reconnect_of;
        assert_eq!(
            option("path[,websocket=on|off][,reconnect=seconds]\n"),
            "reconnect=1"
        );
        assert_eq!(
            option("path[,websocket=on|off][,reconnect-ms=milliseconds]\n"),
            "reconnect-ms=10"
        );
    }

    #[test]
    fn an_emulator_that_crashes_is_told_from_a_guest_that_goes_off() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        for (end, crashed) in [("kill -SEGV $$", true), ("exit 1", false)] {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("echo CLEAVE-MARK up; {end}")]);
            let mut machine = Machine::run(command, &log, Duration::from_secs(30)).unwrap();
            machine.expect("up").unwrap();
            let why = machine.mark().unwrap_err();
            assert_eq!(why.starts_with(CRASHED), crashed, "{why}");
            assert!(why.contains("went off too early"), "{why}");
        }
    }

    #[test]
    fn an_emulator_that_hangs_is_told_with_what_its_threads_wait_for() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sleep");
        command.arg("60");
        let log = folder.path().join("log");
        let mut machine = Machine::run(command, &log, Duration::ZERO).unwrap();
        // It may not have begun to sleep yet.
        let until = Instant::now() + Duration::from_secs(30);
        while !machine.threads().contains("nanosleep") && Instant::now() < until {}
        let why = machine.mark().unwrap_err();
        assert!(why.contains("did not answer in time"), "{why}");
        let (_, threads) = why.split_once("QEMU's threads:").unwrap();
        assert!(threads.contains("nanosleep"), "{why}");
    }

    #[test]
    fn reports_of_the_guest_are_read_behind_lines_of_the_kernel() {
        let report = super::report;
        assert_eq!(
            report("[ 1.0] hmCLEAVE-TEST a FAIL it is"),
            Some(("TEST", "a", "FAIL it is"))
        );
        assert_eq!(report("CLEAVE-END"), Some(("END", "", "")));
        assert_eq!(report("[    1.234] Linux version 6.1"), None);
    }
}
