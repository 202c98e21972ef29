//! `cleave serve --config`: a disk from a file.

use std::fs;
use std::path::{Path, PathBuf};

use cleave_tests::http::get;
use cleave_tests::{Daemon, Node, Scratch, exercise, run_to_exit, small, wait_until};
use serde_json::json;

fn write(scratch: &Scratch, text: &str) -> PathBuf {
    let path = scratch.join("disk.toml");
    fs::write(&path, text).unwrap();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A daemon with that file and a control socket, and the path of that socket.
fn serve(scratch: Scratch, config: &Path) -> (Daemon, PathBuf) {
    Daemon::serve_with_control_in(scratch, &["--config", text(config)])
}

#[test]
fn a_disk_is_served_as_its_file_says() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("a.img", 4 << 20);
    let config = write(
        &scratch,
        &format!(
            "disk = [{:?}]\nqueues = 2\nserial = \"a\"\ncompletion = \"interrupt\"\nread_only = false\n\n\
             [on_error]\nwrite = \"hold\"\n\n[limits]\niops-total = 5000\n",
            text(&image)
        ),
    );
    let (daemon, control) = serve(scratch, &config);
    exercise(&mut daemon.open(&small(2))).unwrap();
    let report = get(&control, "/v1/disks/a");
    let tuning = &report["tuning"];
    assert_eq!(tuning["completion"], json!("interrupt"));
    assert_eq!(tuning["limits"], json!({"iops-total": 5000}));
    assert_eq!(
        tuning["on_error"],
        json!("read=report,write=hold,enospc=hold")
    );
    daemon.finish();
}

/// The file in which a node keeps a disk is such a file.
#[test]
fn the_file_of_a_node_serves_the_same_disk() {
    let node = Node::start();
    let body = json!({"disk": ["ram:4M"], "serial": "a", "queues": 3, "split": "64K", "on_error": {"read": "retry:5"}});
    node.add("d1", &body);
    let file = node.daemon.scratch().join("state/disks/d1.toml");
    assert!(wait_until(|| file.exists()));
    let scratch = Scratch::in_memory();
    let config = write(&scratch, &fs::read_to_string(&file).unwrap());
    node.daemon.finish();
    let (daemon, control) = serve(scratch, &config);
    let report = get(&control, "/v1/disks/a");
    assert_eq!(report["tuning"]["split"], json!("64K"));
    daemon.finish();
}

#[test]
fn what_is_wrong_is_refused_in_a_line() {
    let scratch = Scratch::in_memory();
    let disk = "disk = [\"ram:1M\"]\n";
    for (content, more, named) in [
        (
            format!("{disk}colour = 1\n"),
            "",
            "disk.toml: line 2: unknown field `colour`",
        ),
        (format!("{disk}queues = 0\n"), "", "disk.toml: "),
        (
            format!("{disk}queues = 2\n"),
            "--queues 2",
            "--queues stands on the command line too",
        ),
        (
            disk.to_owned(),
            "--disk ram:2M",
            "--disk stands on the command line too",
        ),
        (
            format!("{disk}pool = \"fast\"\n"),
            "",
            "pool: it is for the disks of a node",
        ),
        (
            format!("{disk}persistent = true\n"),
            "",
            "persistent: it is for the disks of a node",
        ),
        (
            format!("{disk}[limits]\ngroup = \"g\"\n"),
            "",
            "limits.group: it is for the disks of a node",
        ),
        (String::new(), "", "no disk"),
        (format!("{disk}queues"), "", "line 2"),
    ] {
        let config = write(&scratch, &content);
        let socket = scratch.join("socket");
        let mut line = vec![
            "serve",
            "--config",
            text(&config),
            "--socket-path",
            text(&socket),
        ];
        line.extend(more.split_whitespace());
        let ended = run_to_exit(&line);
        assert_eq!(
            (ended.code, ended.stderr.lines().count()),
            (Some(2), 1),
            "{content}: {}",
            ended.stderr
        );
        assert!(ended.stderr.contains(named), "{content}: {}", ended.stderr);
    }
    let ended = run_to_exit(&["serve", "--config", "/no/such/file", "--socket-path", "/s"]);
    assert!(
        ended.code == Some(1)
            && ended
                .stderr
                .contains("--config /no/such/file: No such file"),
        "{}",
        ended.stderr
    );
}

/// A device has no end, and an image is larger than memory.
#[test]
fn a_file_that_is_no_description_is_not_read_to_its_end() {
    let scratch = Scratch::in_memory();
    let image = scratch.join("image");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    for config in ["/dev/zero", text(&image)] {
        let ended = run_to_exit(&["serve", "--config", config, "--socket-path", "/s"]);
        assert!(
            ended.code == Some(2) && ended.stderr.contains(&format!("{config}: it is too long")),
            "{}",
            ended.stderr
        );
    }
}
