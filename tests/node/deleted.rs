//! Disks are deleted: what is in use is asked for first, and nothing is left.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cleave_client::Client;
use cleave_tests::{Node, Scratch, exercise, http, run_to_exit, scale, small, wait_until};
use serde_json::{Value, json};

use crate::state_file::{SlowFile, is_kept};
use crate::{killed, mounted, ram};

#[test]
fn a_disk_in_use_is_deleted_only_by_force() {
    let node = Node::start();
    node.add("a", &ram());
    node.add("b", &ram());
    let mut client = node.open("a", &small(1));
    exercise(&mut client).unwrap();
    let refused = node.ask("DELETE", "/v1/disks/a", "");
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert!(refused.error().contains("mode=drain"));
    exercise(&mut client).unwrap();
    assert_eq!(node.ask("DELETE", "/v1/disks/a?mode=soft", "").status, 400);
    let gone = node.ask("DELETE", "/v1/disks/a?mode=drain", "");
    assert_eq!((gone.status, &gone.json()["lost"]), (200, &Value::Null));
    assert!(exercise(&mut client).is_err());
    assert!(!node.socket("a").parent().unwrap().exists());
    assert_eq!(node.ask("DELETE", "/v1/disks/a", "").status, 404);
    let mut client = node.open("b", &small(1));
    exercise(&mut client).unwrap();
    assert_eq!(node.ask("DELETE", "/v1/disks/b?mode=hard", "").status, 200);
    node.add("b", &ram());
    assert_eq!(node.ask("DELETE", "/v1/disks/b?mode=safe", "").status, 200);
    node.daemon.finish();
}

/// A node that is killed leaves the socket behind, and the next one cannot open the disk.
#[test]
fn nothing_is_left_of_a_disk_that_is_deleted_before_it_was_served_again() {
    let images = Scratch::new();
    let image = images.image("a", 4 << 20);
    let node = Node::start();
    node.add("a", &json!({"disk": [image]}));
    let node = killed(node, |_| std::fs::remove_file(&image).unwrap());
    assert!(wait_until(|| node.state("a") == "failed"));
    assert!(node.socket("a").exists());
    assert_eq!(node.ask("DELETE", "/v1/disks/a", "").status, 200);
    assert!(!node.socket("a").parent().unwrap().exists());
    node.daemon.finish();
}

#[test]
fn adding_and_removing_leaks_nothing_and_disturbs_nobody() {
    let node = Node::start();
    for at in 0..15 {
        node.add(&format!("d{at}"), &ram());
    }
    let mut client = node.open("d0", &small(1));
    let round = |client: &mut Client| {
        node.add("again", &ram());
        exercise(&mut node.open("again", &small(1))).unwrap();
        exercise(client).unwrap();
        let gone = node.ask("DELETE", "/v1/disks/again?mode=drain", "");
        assert_eq!(gone.status, 200, "{}", gone.body);
    };
    (0..5).for_each(|_| round(&mut client));
    let (fds, threads, rss) = (
        node.daemon.fds_at_rest(),
        node.daemon.threads(),
        node.daemon.rss_kib(),
    );
    (0..scale(100)).for_each(|_| round(&mut client));
    node.daemon.fds_settle_at(fds).unwrap();
    node.daemon.threads_settle_at(threads).unwrap();
    node.daemon.settles_small(rss, 2048).unwrap();
    drop(client);
    node.daemon.finish();
}

/// A disk that was deleted while its file was being written would come back when the node starts again.
#[test]
fn a_disk_that_is_deleted_while_it_is_added_is_gone() {
    let node = Node::start();
    let body = json!({"disk": ["ram:1M"]});
    let file = SlowFile::of(&node, "d1");
    std::thread::scope(|scope| {
        let added = scope.spawn(|| node.put("d1", &body).status);
        assert!(file.is_reached());
        let gone = scope.spawn(|| node.ask("DELETE", "/v1/disks/d1?mode=hard", "").status);
        assert!(wait_until(|| node.state("d1") == "ended"));
        drop(file);
        assert_eq!(added.join().unwrap(), 409);
        assert_eq!(gone.join().unwrap(), 200);
    });
    assert!(!is_kept(&node, "d1"));
    assert_eq!(node.ask("GET", "/v1/disks/d1", "").status, 404);
    node.daemon.finish();
}

/// A disk that drains is shown as ending, and the operator can end the drain.
#[test]
fn a_disk_that_drains_can_be_ended_at_once() {
    let node = Node::start();
    let Some((_mount, silent)) = mounted() else {
        return;
    };
    let body = json!({"disk": [silent.file()], "queues": 1, "stop_deadline": 50, "direct": "off"});
    node.add("hung", &body);
    let mut client = node.open("hung", &small(1));
    silent.stop_answering();
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = client.queue(0).read(0, &mut [0; 4096]);
        });
        assert!(wait_until(
            || node.disk("hung")["in_flight"]["requests"] == json!(1)
        ));
        let drained = scope.spawn(|| node.ask("DELETE", "/v1/disks/hung?mode=drain", ""));
        assert!(wait_until(|| !node.socket("hung").exists()));
        let seen = node.state("hung");
        let control = node.daemon.socket().to_str().unwrap();
        let words = ["disk", "remove", "hung", "--mode", "hard", "--control"];
        let ended = run_to_exit(&[&words[..], &[control]].concat());
        let took = start.elapsed();
        drop(silent);
        assert_eq!((ended.code, seen.as_str()), (Some(1), "ending"));
        assert!(took < Duration::from_secs(20), "{took:?}");
        assert_eq!(ended.stdout, "hung: removed\n");
        assert!(ended.stderr.contains("in flight"), "{}", ended.stderr);
        assert_eq!(drained.join().unwrap().status, 200);
    });
    node.daemon.finish();
}

#[test]
fn an_image_is_free_when_its_quiesced_disk_is_deleted() {
    let images = Scratch::new();
    let body = json!({"disk": [images.image("a", 1 << 20)]});
    let node = Node::start();
    node.add("a", &body);
    let quiet = node.ask("POST", "/v1/disks/a/quiesce", r#"{"seconds": 60}"#);
    assert_eq!(quiet.status, 200, "{}", quiet.body);
    assert_eq!(node.ask("DELETE", "/v1/disks/a", "").status, 200);
    assert!(wait_until(|| node.put("b", &body).status == 201));
    node.daemon.finish();
}

/// The timer of the quiet would hold the image until its time is over.
#[test]
fn a_quiet_whose_body_comes_after_the_end_of_its_disk_is_refused() {
    // The body has to come within five seconds.
    let images = Scratch::in_memory();
    let body = json!({"disk": [images.image("a", 1 << 20)]});
    let node = Node::start();
    node.add("a", &body);
    let mut late = UnixStream::connect(node.daemon.socket()).unwrap();
    let quiet = r#"{"seconds": 60}"#;
    let length = quiet.len();
    write!(
        late,
        "POST /v1/disks/a/quiesce HTTP/1.1\r\nHost: node\r\nConnection: close\r\nExpect: 100-continue\r\n\
         Content-Length: {length}\r\n\r\n"
    )
    .unwrap();
    // It is sent when the handler waits for the body.
    let mut told = [0; 12];
    late.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"HTTP/1.1 100");
    assert_eq!(node.ask("DELETE", "/v1/disks/a", "").status, 200);
    late.write_all(quiet.as_bytes()).unwrap();
    let mut answer = String::new();
    late.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("HTTP/1.1 409"), "{answer}");
    node.add("b", &body);
    node.daemon.finish();
}

/// Orders wait in a queue, and nobody repeats one to end.
#[test]
fn a_disk_ends_although_it_is_given_very_many_other_orders() {
    let node = Node::start();
    let is_over = AtomicBool::new(false);
    let orders = "POST /v1/disks/d/resize HTTP/1.1\r\nHost: node\r\n\r\n".repeat(100);
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                let mut flood = UnixStream::connect(node.daemon.socket()).unwrap();
                let mut answers = flood.try_clone().unwrap();
                scope.spawn(move || std::io::copy(&mut answers, &mut std::io::sink()));
                while !is_over.load(Ordering::Relaxed) {
                    if flood.write_all(orders.as_bytes()).is_err() {
                        break;
                    }
                }
                let _ = flood.shutdown(Shutdown::Both);
            });
        }
        let gone = (0..3).map(|_| {
            if node.put("d", &ram()).status != 201 {
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
            let path = "/v1/disks/d?mode=drain";
            let request =
                format!("DELETE {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
            let answer = http::converse(
                node.daemon.socket(),
                request.as_bytes(),
                cleave_tests::TIMEOUT,
            );
            answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
        });
        let all = gone.take_while(|is_gone| *is_gone).count();
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(all, 3);
    });
    node.daemon.finish();
}
