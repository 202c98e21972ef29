//! `cleave disk`: asks a control socket for something about its disks, by a request for each disk.

mod ask;
mod lines;
mod list;

use std::time::Duration;

use cleave_api::{ClientError, HttpClient, Operation};
use cleave_host::Failure;
use serde_json::Value;

use crate::output::{print, print_more};
pub(crate) use ask::{Ask, DiskChoice, Remote};
pub(crate) use lines::{clean, visible};
pub(crate) use list::{Listed, list, unanswered};

/// The longest that a node takes for an answer, a quiet of 60 s and the end of a disk that hangs included, with room.
const PATIENCE: Duration = Duration::from_secs(180);

/// Asks, and prints the answers.
pub(crate) fn run(remote: &Remote) -> Result<(), Failure> {
    let client = HttpClient::new(&remote.socket, PATIENCE);
    if remote.ask == Ask::Events {
        return watch(remote, &client);
    }
    let listed = || list(&client).map_err(|error| failure(remote, &error));
    let ids = match &remote.disks {
        DiskChoice::Any => vec![String::new()],
        DiskChoice::Named(id) => vec![id.clone()],
        DiskChoice::Only => vec![list::only(&remote.socket, &listed()?)?],
        DiskChoice::Served => {
            let served = listed()?.into_iter().filter(Listed::is_served);
            served.map(|disk| disk.id).collect()
        }
    };
    // One that is refused leaves the others alone.
    let each = ids.iter().map(|id| ask(remote, &client, id));
    each.fold(Ok(()), Result::and)
}

/// Asks for something about a disk, and prints the answer.
fn ask(remote: &Remote, client: &HttpClient, id: &str) -> Result<(), Failure> {
    let failed = |error| failure(remote, &error);
    let (method, target, body) = remote.ask.request(id);
    let reply = client.send(method, &target, &body).map_err(failed)?;
    if let Some(why) = reply.refusal() {
        return Err(match reply.status {
            400 => Failure::input(why),
            _ => Failure::run(why),
        });
    }
    let body = reply.json().map_err(failed)?;
    let id = clean(id);
    print(&match remote.json {
        true => lines::visible(&reply.body),
        false => told(&remote.ask, &id, reply.status, &body),
    })?;
    fault(&remote.ask, &id, &body).map_or(Ok(()), |why| Err(Failure::run(why)))
}

/// Prints events until the node ends or nobody reads them any more.
fn watch(remote: &Remote, client: &HttpClient) -> Result<(), Failure> {
    let failed = |error| failure(remote, &error);
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
    Err(Failure::run("the daemon has ended"))
}

fn failure(remote: &Remote, error: &ClientError) -> Failure {
    Failure::run(unanswered(&remote.socket, error))
}

/// Says that the request was carried out, but not as it was meant.
fn fault(ask: &Ask, id: &str, body: &Value) -> Option<String> {
    match ask {
        Ask::Order(Operation::ResumeDisk, asked) => unquiet(id, asked, body),
        Ask::Order(Operation::ResizeDisk, _) => lines::cut_off(id, body),
        Ask::Remove(_) => lines::lost(id, body),
        _ => None,
    }
}

/// Says that a quiet which was to be ended was over before: a copy that was taken meanwhile may be torn.
fn unquiet(id: &str, asked: &Value, body: &Value) -> Option<String> {
    let is_for_held = asked.get("held").is_some();
    // A daemon that does not say it cannot be blamed for it.
    let is_over = body.get("quiesced") == Some(&Value::Bool(false));
    (is_over && !is_for_held).then(|| {
        format!(
            "{id}: was not quiesced any more: its time was over, its guest has moved, or something else ended it: take copies made \
             meanwhile again"
        )
    })
}

/// An answer in words.
fn told(ask: &Ask, id: &str, status: u16, body: &Value) -> String {
    match ask {
        Ask::List => lines::list(body),
        Ask::Show => lines::sheet(body),
        Ask::Add(_) => lines::added(id, status, body),
        Ask::Set(_) => format!("{id}: changed\n"),
        Ask::Order(Operation::ResumeDisk, asked) => lines::resumed(id, asked, body),
        Ask::Order(Operation::ResizeDisk, _) => lines::resized(id, status, body),
        Ask::Order(operation, _) => lines::ordered(id, *operation, body),
        Ask::Remove(_) => lines::removed(id),
        // They are printed as they come.
        Ask::Events => String::new(),
    }
}
