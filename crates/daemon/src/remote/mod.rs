//! `cleave disk`: tells a node about its disks. Each command is one request to the node's control socket.

mod ask;
mod exchange;
mod lines;

use serde_json::Value;

use crate::failure::Failure;
use crate::output::{print, print_more};
pub(crate) use ask::{Ask, Remote};
use exchange::{Answer, Exchange};
pub(crate) use lines::visible;

/// Asks, and prints the answer.
pub(crate) fn run(remote: &Remote) -> Result<(), Failure> {
    let exchange = Exchange::begin(&remote.socket, &remote.ask)?;
    if remote.ask == Ask::Events {
        return exchange.each_line(|line| {
            print_more(&match remote.json {
                true => format!("{}\n", lines::visible(line)),
                false => lines::event(line),
            })
        });
    }
    let answer = exchange.finish()?;
    if let Some(problem) = answer.problem() {
        return Err(match answer.status {
            400 => Failure::input(problem),
            _ => Failure::run(problem),
        });
    }
    let fault = fault(&remote.ask, &answer)?;
    print(&match remote.json {
        true => lines::visible(&answer.body),
        false => told(&remote.ask, &answer)?,
    })?;
    fault.map_or(Ok(()), Err)
}

/// Says that the request was carried out, but not as it was meant.
fn fault(ask: &Ask, answer: &Answer) -> Result<Option<Failure>, Failure> {
    match ask {
        Ask::Order(id, "resume", body) => unquiet(id, body, answer),
        Ask::Order(id, "resize", _) => Ok(lines::cut_off(id, &answer.json()?).map(Failure::run)),
        _ => Ok(None),
    }
}

/// Says that a quiet which was to be ended was over before: a copy that was taken meanwhile may be torn.
fn unquiet(id: &str, body: &Value, answer: &Answer) -> Result<Option<Failure>, Failure> {
    let is_for_held = body.get("held").is_some();
    // A node that does not say it cannot be blamed for it.
    let is_over = answer.json()?.get("quiesced") == Some(&Value::Bool(false));
    Ok((is_over && !is_for_held).then(|| {
        Failure::run(format!(
            "{id}: was not quiesced any more: its time was over, or something else ended it: take copies made meanwhile again"
        ))
    }))
}

/// An answer in words.
fn told(ask: &Ask, answer: &Answer) -> Result<String, Failure> {
    let body = answer.json()?;
    Ok(match ask {
        Ask::List => lines::list(&body),
        Ask::Show(_) => lines::sheet(&body),
        Ask::Add(id, _) => lines::added(id, answer.status, &body),
        Ask::Set(id, _) => format!("{id}: changed\n"),
        Ask::Order(id, "resume", asked) => lines::resumed(id, asked, &body),
        Ask::Order(id, "resize", _) => lines::resized(id, answer.status, &body),
        Ask::Order(id, what, _) => lines::ordered(id, what, &body),
        Ask::Remove(id, _) => lines::removed(id, &body),
        // They are printed as they come.
        Ask::Events => String::new(),
    })
}
