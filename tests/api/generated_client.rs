//! A client that another program generates from the OpenAPI document.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use cleave_api::Operation;
use cleave_tests::{Node, Scratch};
use serde_json::Value;

/// The generator whose client drives a node, pinned so that a new one does not change what is tested.
const GENERATOR: &str = "openapi-python-client==0.29.0";

/// Runs a program to its end. The error is what it printed.
fn run_program(command: &mut Command) -> Result<String, String> {
    let ended = command.output().map_err(|error| error.to_string())?;
    let printed = [ended.stdout, ended.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    match ended.status.success() {
        true => Ok(printed),
        false => Err(format!("{command:?}: {printed}")),
    }
}

/// Installs the generator below the target folder. Returns the folder of its programs, or why there is none.
fn install_generator() -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(GENERATOR);
    let programs = folder.join("bin");
    if programs.join("openapi-python-client").exists() {
        return Ok(programs);
    }
    run_program(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    let mut pip = Command::new(programs.join("pip"));
    run_program(pip.args([
        "install",
        "--quiet",
        "--timeout",
        "20",
        "--retries",
        "1",
        GENERATOR,
    ]))?;
    Ok(programs)
}

/// `putDisk` as the module of a Python package: `put_disk`.
fn module_name(operation: &str) -> String {
    let each = operation.chars().map(|c| match c.is_ascii_uppercase() {
        true => format!("_{}", c.to_ascii_lowercase()),
        false => c.to_string(),
    });
    each.collect()
}

#[test]
fn a_generated_client_has_every_operation_and_drives_a_node() {
    let programs = match install_generator() {
        Ok(programs) => programs,
        Err(why) => {
            // Past the capture of the test runner.
            let _ = writeln!(std::io::stderr(), "skipped: {GENERATOR}: {why}");
            return;
        }
    };
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
    let scratch = Scratch::in_memory();
    let client = scratch.join("cleave_node");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut generate = Command::new(programs.join("openapi-python-client"));
    generate
        .args(["generate", "--meta", "none", "--fail-on-warning", "--path"])
        .arg(document)
        .arg("--output-path")
        .arg(&client)
        // It formats what it has written with a program beside it.
        .env("PATH", format!("{}:{path}", programs.display()));
    let printed = run_program(&mut generate).unwrap();
    for word in ["will not be generated", "nsupported", "WARNING"] {
        assert!(!printed.contains(word), "{printed}");
    }
    let document: Value = serde_json::from_str(include_str!("../../docs/openapi.json")).unwrap();
    let methods = document["paths"].as_object().unwrap().values();
    let operations: Vec<_> = methods
        .flat_map(|methods| methods.as_object().unwrap().values())
        .collect();
    assert_eq!(operations.len(), Operation::ALL.len());
    for operation in operations {
        let name = module_name(operation["operationId"].as_str().unwrap());
        let folder = client
            .join("api")
            .join(operation["tags"][0].as_str().unwrap());
        assert!(folder.join(format!("{name}.py")).exists(), "{name}");
    }
    let node = Node::start();
    let mut drive = Command::new(programs.join("python"));
    drive
        .arg("-B")
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/api/generated_client.py"
        ))
        .arg(node.daemon.socket())
        .env("PYTHONPATH", scratch.path());
    run_program(&mut drive).unwrap_or_else(|why| panic!("{why}\n{}", node.daemon.log_tail()));
    node.daemon.finish();
}
