//! `cleave disk`: tells a node about its disks. Each command is one request to the node's control socket.

mod ask;
mod lines;

use std::path::Path;
use std::time::Duration;

use cleave_api::{ClientError, HttpClient, Operation};
use serde_json::Value;

use crate::failure::Failure;
use crate::output::{print, print_more};
pub(crate) use ask::{Ask, Remote};
pub(crate) use lines::visible;

/// The longest that a node takes for an answer, a quiet of 60 s and the end of a disk that hangs included, with room.
const PATIENCE: Duration = Duration::from_secs(180);

/// Asks, and prints the answer.
pub(crate) fn run(remote: &Remote) -> Result<(), Failure> {
    let client = HttpClient::new(&remote.socket, PATIENCE);
    if remote.ask == Ask::Events {
        return watch(remote, &client);
    }
    let failed = |error| failure(&remote.socket, &error);
    let (method, target, body) = remote.ask.request();
    let reply = client.send(method, &target, &body).map_err(failed)?;
    if let Some(why) = reply.refusal() {
        return Err(match reply.status {
            400 => Failure::input(why),
            _ => Failure::run(why),
        });
    }
    let body = reply.json().map_err(failed)?;
    print(&match remote.json {
        true => lines::visible(&reply.body),
        false => told(&remote.ask, reply.status, &body),
    })?;
    fault(&remote.ask, &body).map_or(Ok(()), |why| Err(Failure::run(why)))
}

/// Prints events until the node ends or nobody reads them any more.
fn watch(remote: &Remote, client: &HttpClient) -> Result<(), Failure> {
    let failed = |error| failure(&remote.socket, &error);
    for line in client.watch("", None).map_err(failed)? {
        let line = line.map_err(failed)?;
        let is_read = print_more(&match remote.json {
            true => format!("{}\n", lines::visible(&line)),
            false => lines::event(&line),
        })?;
        if !is_read {
            return Ok(());
        }
    }
    Err(Failure::run("the node has ended"))
}

/// Says why there is no answer, and what to do.
fn failure(socket: &Path, error: &ClientError) -> Failure {
    let socket = socket.display();
    Failure::run(match error {
        ClientError::NoSocket | ClientError::NoListener => format!(
            "control socket {socket}: nobody listens: start `cleave node`, or name its socket with --control"
        ),
        ClientError::OtherUser => {
            format!("control socket {socket}: {error}: run this command as that user")
        }
        ClientError::Refused(why) => why.clone(),
        _ => format!("control socket {socket}: {error}"),
    })
}

/// Says that the request was carried out, but not as it was meant.
fn fault(ask: &Ask, body: &Value) -> Option<String> {
    match ask {
        Ask::Order(id, Operation::ResumeDisk, asked) => unquiet(id, asked, body),
        Ask::Order(id, Operation::ResizeDisk, _) => lines::cut_off(id, body),
        _ => None,
    }
}

/// Says that a quiet which was to be ended was over before: a copy that was taken meanwhile may be torn.
fn unquiet(id: &str, asked: &Value, body: &Value) -> Option<String> {
    let is_for_held = asked.get("held").is_some();
    // A node that does not say it cannot be blamed for it.
    let is_over = body.get("quiesced") == Some(&Value::Bool(false));
    (is_over && !is_for_held).then(|| {
        format!(
            "{id}: was not quiesced any more: its time was over, or something else ended it: take copies made meanwhile again"
        )
    })
}

/// An answer in words.
fn told(ask: &Ask, status: u16, body: &Value) -> String {
    match ask {
        Ask::List => lines::list(body),
        Ask::Show(_) => lines::sheet(body),
        Ask::Add(id, _) => lines::added(id, status, body),
        Ask::Set(id, _) => format!("{id}: changed\n"),
        Ask::Order(id, Operation::ResumeDisk, asked) => lines::resumed(id, asked, body),
        Ask::Order(id, Operation::ResizeDisk, _) => lines::resized(id, status, body),
        Ask::Order(id, operation, _) => lines::ordered(id, *operation, body),
        Ask::Remove(id, _) => lines::removed(id, body),
        // They are printed as they come.
        Ask::Events => String::new(),
    }
}
