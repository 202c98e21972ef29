//! QEMU's monitor: a command and its answer, a line of JSON each (QMP).

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::command::{At, Result};

/// QEMU makes its socket soon after its start, and answers at once; the rest is a busy machine's.
const LIMIT: Duration = Duration::from_secs(60);
/// Between two looks at something that QEMU does by itself.
const LOOK: Duration = Duration::from_millis(10);

/// A connection to the monitor of a running QEMU.
pub struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Returns QEMU's option for a monitor with this socket.
    pub fn option(socket: &Path) -> Vec<String> {
        let at = format!("unix:{},server=on,wait=off", socket.display());
        vec!["-qmp".to_owned(), at]
    }

    /// Connects as soon as QEMU listens.
    pub fn connect(socket: &Path) -> Result<Monitor> {
        let end = Instant::now() + LIMIT;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > end => return Err(error).at(socket),
                Err(_) => std::thread::sleep(LOOK),
            }
        };
        stream.set_read_timeout(Some(LIMIT)).at(socket)?;
        let mut monitor = Monitor {
            stream: BufReader::new(stream),
        };
        // It greets, and wants to be told that it is understood.
        monitor.line()?;
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Returns the answer to a command.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({"execute": command, "arguments": arguments}).to_string();
        let stream = self.stream.get_mut();
        stream
            .write_all(format!("{line}\n").as_bytes())
            .at(command)?;
        loop {
            let mut answer = self.line()?;
            if let Some(answer) = answer.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = answer.get("error") {
                return Err(format!("QEMU refuses `{line}`: {error}"));
            }
            // An event.
        }
    }

    /// Asks until a field of the answer, a word, is one of these; returns that word. QEMU works on meanwhile.
    pub fn wait(&mut self, query: &str, field: &str, words: &[&str]) -> Result<String> {
        let end = Instant::now() + LIMIT;
        loop {
            let answer = self.ask(query, json!({}))?;
            let word = answer.get(field).and_then(Value::as_str);
            match word {
                Some(word) if words.contains(&word) => return Ok(word.to_owned()),
                _ if Instant::now() > end => {
                    return Err(format!("`{query}` comes to none of {words:?}: {answer}"));
                }
                _ => std::thread::sleep(LOOK),
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line).at("QEMU's monitor")?;
        match read {
            0 => Err("QEMU closed its monitor".to_owned()),
            _ => serde_json::from_str(&line).at("QEMU's monitor"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn events_are_passed_over_and_refusals_are_errors() {
        let socket = std::env::temp_dir().join(format!("cleave-monitor-{}", std::process::id()));
        let listener = UnixListener::bind(&socket).unwrap();
        let qemu = std::thread::spawn(move || {
            let mut peer = listener.accept().unwrap().0;
            let mut asked = BufReader::new(peer.try_clone().unwrap());
            peer.write_all(b"{\"QMP\": {}}\n").unwrap();
            for answers in [
                "{\"return\": {}}\n",
                "{\"event\": \"STOP\"}\n{\"return\": {\"status\": \"setup\"}}\n",
                "{\"return\": {\"status\": \"active\"}}\n",
                "{\"error\": {\"desc\": \"no such command\"}}\n",
            ] {
                asked.read_line(&mut String::new()).unwrap();
                peer.write_all(answers.as_bytes()).unwrap();
            }
        });
        let mut monitor = Monitor::connect(&socket).unwrap();
        let status = monitor.wait("query-migrate", "status", &["active"]);
        assert_eq!(status.unwrap(), "active");
        let refused = monitor.ask("nonsense", json!({}));
        assert!(refused.unwrap_err().contains("no such command"));
        qemu.join().unwrap();
        assert!(monitor.ask("anything", json!({})).is_err());
        std::fs::remove_file(socket).unwrap();
    }
}
