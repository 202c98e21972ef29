use std::path::Path;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use cleave_config::{Change, Names, SplitOption, Storage};
use cleave_disk::{Direct, Overwrite, StripeKind};
use cleave_host::{Endpoint, SocketSettings};
use cleave_rig::pages::{Shown, commands_of};
use tracing::level_filters::LevelFilter;

use super::*;
use crate::commands::probe::Depth;

fn parsed(line: &str) -> Result<Action, Failure> {
    parse(line.split_whitespace().map(OsString::from))
}

fn serve(line: &str) -> ServeSettings {
    match parsed(line) {
        Ok(Action::Serve(settings)) => *settings,
        other => panic!("{line}: {other:?}"),
    }
}

/// Returns the storage of a disk to serve.
fn storage(line: &str) -> Storage {
    serve(line).config.storage(Names::Options).unwrap()
}

/// Returns the failure of a line, which may come with the check of the disk.
fn refusal(line: &str) -> Failure {
    let checked = |config: &DiskConfig| {
        config.check(Names::Options)?;
        config.storage(Names::Options)
    };
    match parsed(line) {
        Err(failure) => failure,
        Ok(Action::Serve(settings)) => Failure::input(checked(&settings.config).expect_err(line)),
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn the_definitions_are_sound() {
    Cli::command().debug_assert();
}

#[test]
fn defaults_are_those_documented() {
    let got = serve("cleave serve --socket-path /s --disk null:1G");
    let defaults = ServeSettings {
        config: DiskConfig {
            disk: vec![WrittenSpec::from(DiskSpec::Null(1 << 30))],
            ..DiskConfig::default()
        },
        endpoint: Endpoint::Path("/s".into()),
        once: false,
        control: None,
        metrics: None,
        sandbox: !cfg!(sanitized),
        user: None,
        group: None,
        log: LevelFilter::INFO,
        take_over: false,
        exit_with_parent: None,
    };
    assert_eq!(got, defaults);
}

#[test]
fn every_option_reaches_the_settings() {
    let base = "cleave serve --fd 3 --disk /d";
    assert_eq!(serve(base).endpoint, Endpoint::Fd(3));
    for (options, fields) in [
        ("--read-only", "read_only = true"),
        ("--serial abc", "serial = 'abc'"),
        ("--block-size 4K", "block_size = 4096"),
        ("--cache writethrough", "cache = 'writethrough'"),
        ("--direct on", "direct = 'on'"),
        ("--discard off", "discard = 'off'"),
        ("--queues 7", "queues = 7"),
        ("--queue-size 32768", "queue_size = 32768"),
        ("--workers 5", "workers = 5"),
        ("--start inactive", "start = 'inactive'"),
        ("--cpus 0", "cpus = '0'"),
        ("--completion poll", "completion = 'poll'"),
        ("--spin-cpu-max 0", "spin_cpu_max = 0"),
        ("--spin-cpu-total 80", "spin_cpu_total = 80"),
        ("--spin-rate-min 0", "spin_rate_min = 0"),
        ("--spin-worth 10000", "spin_worth = 10000"),
        (
            "--coalesce-us 30 --coalesce-max 8",
            "coalesce_us = 30\ncoalesce_max = 8",
        ),
        (
            "--on-error read=retry:5,enospc=hold --control /c",
            "on_error = 'read=retry:5,write=report,enospc=hold'",
        ),
        ("--on-error retry", "on_error = 'retry:30'"),
    ] {
        let config = DiskConfig::from_toml(&format!("disk = ['/d']\n{fields}\n")).unwrap();
        let got = serve(&format!("{base} {options}")).config;
        assert_eq!(got, config, "{options}");
        assert_ne!(got, serve(base).config, "{options}");
    }
    let with = |options: &str| serve(&format!("{base} {options}"));
    assert!(with("--once").once);
    assert_eq!(with("--log trace").log, LevelFilter::TRACE);
    let named = with("--user u --group g");
    assert_eq!(
        [named.user.as_deref(), named.group.as_deref()],
        [Some("u"), Some("g")]
    );
    let sockets = with("--control /c --control-group a --metrics /m --metrics-group b");
    let socket = |path: &str, group: &str| {
        Some(SocketSettings {
            path: path.into(),
            group: Some(group.to_owned()),
        })
    };
    assert_eq!(sockets.control, socket("/c", "a"));
    // The unit names one, and its options may name another.
    let twice = with("--control /unit --control /c --control-group a");
    assert_eq!(twice.control, socket("/c", "a"));
    assert_eq!(sockets.metrics, socket("/m", "b"));
}

#[test]
fn several_disks_are_a_stripe() {
    let got = storage("cleave serve --fd 3 --disk /a --disk /b --stripe 64k");
    let legs = vec![DiskSpec::Path("/a".into()), DiskSpec::Path("/b".into())];
    let stripe = |kind| Storage::Stripe {
        legs: legs.clone(),
        chunk_bytes: 64 << 10,
        kind,
    };
    assert_eq!(got, stripe(StripeKind::Superblocks));
    let got = storage("cleave serve --fd 3 --disk /a --disk /b --stripe 64K --stripe-raw");
    assert_eq!(got, stripe(StripeKind::Raw));
    match parsed("cleave stripe create --chunk 4M --force /a /b") {
        Ok(Action::Stripe(stripe)) => assert_eq!(
            stripe,
            StripeAction::Create {
                legs,
                chunk_bytes: 4 << 20,
                overwrite: Overwrite::Yes
            }
        ),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        parsed("cleave stripe create /a /b"),
        Ok(Action::Stripe(StripeAction::Create {
            chunk_bytes: 65536,
            overwrite: Overwrite::No,
            ..
        }))
    ));
    // As --disk names them.
    match parsed("cleave stripe show ./ram:1G rbd:vms/web") {
        Ok(Action::Stripe(StripeAction::Show { legs })) => assert_eq!(
            legs,
            [
                DiskSpec::Path("./ram:1G".into()),
                "rbd:vms/web".parse().unwrap()
            ]
        ),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_no_stripe_is_refused_in_one_line() {
    let base = "cleave serve --fd 3";
    let many = " --disk /a".repeat(65);
    let cases = [
        (
            format!("{base} --disk /a --stripe 64K"),
            "stripe of one leg",
        ),
        (format!("{base} --disk /a --disk /b"), "--stripe SIZE"),
        (format!("{base} {many} --stripe 64K"), "at most 64 legs"),
        (
            format!("{base} --disk /a --disk /b --stripe 48K"),
            "power of two from 4K to 4M",
        ),
        (
            format!("{base} --disk /a --disk /b --stripe 2K"),
            "power of two from 4K to 4M",
        ),
        (
            format!("{base} --disk /a --disk /b --stripe 8M"),
            "power of two from 4K to 4M",
        ),
        (
            format!("{base} --disk /a --disk /b --stripe 4G"),
            "power of two from 4K to 4M",
        ),
        (
            format!("{base} --disk /a --disk /b --stripe 4K --block-size 8K"),
            "below --block-size 8K",
        ),
        (
            format!("{base} --disk /a --disk /b --stripe-raw"),
            "--stripe",
        ),
        ("cleave stripe".to_owned(), "create, show"),
        (
            "cleave probe /a /b".to_owned(),
            "2 disks were given: make them one disk with --stripe SIZE",
        ),
        ("cleave stripe create".to_owned(), "<LEG>"),
        (
            "cleave stripe create --chunk 3 /a /b".to_owned(),
            "power of two",
        ),
    ];
    for (line, wanted) in cases {
        let failure = refusal(&line).to_string();
        assert!(failure.contains(wanted), "{line}: {failure}");
        assert!(!failure.contains('\n'), "{failure}");
    }
}

#[test]
fn what_only_adaptive_heeds_is_refused_where_nothing_will_be_adaptive() {
    let base = "cleave serve --fd 3 --disk null:1G";
    let heeded = [
        "--spin-cpu-max 25",
        "--spin-cpu-total 10",
        "--spin-rate-min 1100",
        "--spin-worth 64",
    ];
    for (option, mode) in heeded
        .into_iter()
        .flat_map(|option| ["poll", "interrupt"].map(|mode| (option, mode)))
    {
        let line = format!("{base} --completion {mode} {option}");
        let failure = parsed(&line).unwrap_err();
        assert_eq!(failure.exit_code(), std::process::ExitCode::from(2));
        let (name, _) = option.split_once(' ').unwrap();
        assert!(failure.to_string().starts_with(name), "{line}: {failure}");
        serve(&format!("{line} --control /c"));
        serve(&format!("{base} --completion adaptive {option}"));
        serve(&format!("{base} --completion {mode}"));
    }
}

/// vhost-user "Backend program conventions".
#[test]
fn conventions_work_without_a_subcommand() {
    let got = serve("cleave --socket-path /s --blk-file /images/a --read-only");
    let same = serve("cleave serve --socket-path /s --disk /images/a --read-only");
    assert_eq!(got, same);
    assert_eq!(
        serve("cleave --fd=5 --blk-file=/a").endpoint,
        Endpoint::Fd(5)
    );
    // A path that looks like a spec is still a path.
    assert_eq!(
        storage("cleave --fd 5 --blk-file ram:1G"),
        Storage::One(DiskSpec::Path("ram:1G".into()))
    );
    match parsed("cleave --print-capabilities") {
        Ok(Action::Print(text)) => assert!(text.contains("\"type\": \"block\""), "{text}"),
        other => panic!("{other:?}"),
    }
    // "Other options and arguments should be ignored".
    assert!(matches!(
        parsed("cleave --fd 3 --sandbox=x --print-capabilities"),
        Ok(Action::Print(_))
    ));
}

#[test]
#[allow(clippy::too_many_lines)] // a table
fn bad_input_is_one_line_that_names_the_thing() {
    let cases = [
        ("cleave", "cleave serve"),
        ("cleave serve", "--socket-path"),
        ("cleave serve --fd 3", "--disk"),
        ("cleave --blk-file /a", "--socket-path"),
        ("cleave --socket-path /s", "--blk-file"),
        (
            "cleave --socket-path /s --fd 3 --blk-file /a",
            "cannot be used with",
        ),
        ("cleave --read-only serve", "serve"),
        ("cleave serve --disk null:1G", "--socket-path"),
        (
            "cleave serve --socket-path /s --fd 3 --disk null:1G",
            "cannot be used with",
        ),
        (
            "cleave serve --socket-path /s --disk null:1G --disk null:2G",
            "one disk",
        ),
        ("cleave serve --fd 3 --disk null:huge", "--disk"),
        ("cleave serve --fd 3 --disk model:p3701", "`p3701`"),
        (
            "cleave serve --fd 3 --disk model:custom,channels=0",
            "channels is a number from 1 to 4096",
        ),
        ("cleave serve --fd -1 --disk null:1G", "-1"),
        ("cleave serve --fd x --disk null:1G", "--fd"),
        ("cleave serve --fd 3 --disk null:1G --queues 0", "--queues"),
        (
            "cleave serve --fd 3 --disk null:1G --queues 257",
            "--queues",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --queue-size 3",
            "power of two",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --queue-size 2",
            "from 4 to 32768",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --queue-size 65536",
            "from 4 to 32768",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --workers 0",
            "--workers",
        ),
        ("cleave serve --fd 3 --disk null:1G --cpus 3-1", "backwards"),
        (
            "cleave serve --fd 3 --disk null:1G --block-size 1000",
            "power of two",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --block-size 256",
            "512 to 64K",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --serial aaaaaaaaaaaaaaaaaaaaa",
            "at most 20",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --serial a/b",
            "is not allowed in a serial: use printable ASCII characters, without space and /",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --serial ü",
            "is not allowed in a serial: use printable ASCII characters, without space and /",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --cache maybe",
            "writethrough",
        ),
        ("cleave serve --fd 3 --disk null:1G --log loud", "debug"),
        (
            "cleave serve --fd 3 --disk null:1G --frobnicate",
            "--frobnicate",
        ),
        ("cleave serve --fd 3 --disk null:1G --split on", "off, auto"),
        (
            "cleave serve --fd 3 --disk null:1G --split 48K",
            "power of two",
        ),
        ("cleave serve --fd 3 --disk null:1G --split 8M", "4K to 4M"),
        (
            "cleave serve --fd 3 --disk null:1G --on-error stop",
            "\"stop\" is none of report, hold and retry",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --on-error retry:0",
            "1 to 86400 seconds",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --on-error read=hold,read=report",
            "read= is given twice",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --on-error hold",
            "give --control PATH",
        ),
        (
            "cleave serve --fd 3 --disk null:1G --on-error enospc=retry:9:hold",
            "give --control PATH",
        ),
        ("cleave probe ram:1M ram:1M", "--stripe"),
        ("cleave probe ram:much", "ram:much"),
        ("cleave probe null:1G --destructive", "--writes"),
        ("cleave probe null:1G --full --seconds 3", "--full"),
        ("cleave probe null:1G --quick", "--quick"),
        (
            "cleave serve --fd x --disk null:1M",
            "--fd <N>': write a whole number",
        ),
        (
            "cleave serve --fd 3 --disk null:1M --spin-cpu-max 10%",
            "--spin-cpu-max <PCT>': write a whole number, without sign or unit",
        ),
        (
            "cleave serve --sokcet-path /s --disk null:1M",
            "; a similar argument exists: '--socket-path'",
        ),
        (
            "cleave srve",
            "; some similar subcommands exist: 'stripe', 'serve'",
        ),
        (
            "cleave serve --fd 3 --disk null:1M --coalesce-max 5",
            "--coalesce-max 5 has no effect without a time: also set --coalesce-us",
        ),
        (
            "cleave serve --fd 3 --disk null:1M --coalesce-max 5 --coalesce-us 0",
            "--coalesce-max 5 has no effect without a time",
        ),
        (
            "cleave serve --socket-path /tmp/s --control /tmp/../tmp/./s --disk null:1M",
            "--control and --socket-path are both /tmp/s",
        ),
        ("cleave disk fail", "<ID>"),
        ("cleave probe null:1G --seconds 0", "--seconds"),
        ("cleave frobnicate", "frobnicate"),
    ];
    for (line, part) in cases {
        let failure = refusal(line);
        assert_eq!(
            failure.exit_code(),
            std::process::ExitCode::from(2),
            "{line}"
        );
        let told = failure.to_string();
        assert!(told.contains(part), "{line}: {told}");
        assert!(told.len() < 400 && !told.contains('\n'), "{line}: {told}");
    }
}

#[test]
fn help_shows_every_visible_option_and_examples() {
    for (line, parts) in [
        (
            "cleave --help",
            &["serve", "--print-capabilities", "Examples:"][..],
        ),
        (
            "cleave serve --help",
            &["--queue-size", "--serial", "Examples:", "Signals:"],
        ),
        (
            "cleave help serve",
            &["--queue-size", "--serial", "Examples:", "Signals:"],
        ),
    ] {
        match parsed(line) {
            Ok(Action::Print(text)) => {
                for part in parts {
                    assert!(text.contains(part), "{line}: no {part} in {text}");
                }
            }
            other => panic!("{line}: {other:?}"),
        }
    }
}

#[test]
fn options_page_says_what_the_parser_does() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/options.md");
    let written = std::fs::read_to_string(page).unwrap_or_default();
    assert!(
        written == markdown(),
        "docs/options.md is out of date: cargo run -- --help-markdown > docs/options.md"
    );
}

#[test]
fn the_commands_of_the_pages_are_understood() {
    let commands = commands_of(&cleave_rig::root(), "cleave");
    assert!(commands.len() > 200, "only {}", commands.len());
    let faults = commands.iter().filter_map(|command| {
        let line: Vec<_> = command.words.iter().map(OsString::from).collect();
        let opens_file = command.words.iter().any(|word| word == "--config");
        let why = match command.shown {
            // That file is the reader's.
            Shown::Script | Shown::Session if opens_file => read(&line).err()?.to_string(),
            Shown::Script | Shown::Session => parse(line).err()?.to_string(),
            // It may be the beginning of a line, with words in capitals for values.
            Shown::Sentence => read(&line)
                .err()
                .filter(|error| !is_begun(error))?
                .to_string(),
        };
        Some(format!("{}: {why}", command.at()))
    });
    let faults: Vec<_> = faults.collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_bodies_of_the_pages_are_understood() {
    for command in commands_of(&cleave_rig::root(), "curl") {
        let after = |option: &str| {
            let at = command.words.iter().position(|word| word == option)?;
            command.words.get(at + 1).map(String::as_str)
        };
        let read = match (after("-X"), after("-d").unwrap_or_default().as_bytes()) {
            (Some("PUT"), body) => DiskConfig::from_json(body).map(drop),
            (Some("PATCH"), body) => Change::from_json(body).map(drop),
            (_, []) => Ok(()),
            _ => Err("a body of neither PUT nor PATCH".to_owned()),
        };
        assert_eq!(read, Ok(()), "{}", command.at());
    }
}

/// Returns true if what was read is understood, except for values that are missing or placeholders.
fn is_begun(error: &clap::Error) -> bool {
    let value = error.get(ContextKind::InvalidValue);
    match error.kind() {
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => {
            matches!(value, Some(ContextValue::String(value)) if !value.contains(char::is_lowercase))
        }
        ErrorKind::MissingRequiredArgument | ErrorKind::MissingSubcommand => true,
        _ => !error.use_stderr(),
    }
}

#[test]
fn splitting_is_wished_for_or_not() {
    let disk = |more: &str| serve(&format!("cleave serve --fd 3 --disk /d {more}")).config;
    let split = |more: &str| disk(more).split.get();
    assert_eq!((split(""), disk("").profile), (SplitOption::Auto, None));
    assert_eq!(split("--split off"), SplitOption::Off);
    assert!(matches!(split("--split 64K"), SplitOption::Fixed(size) if size.get() == 64 << 10));
    assert_eq!(disk("--profile /p").profile, Some("/p".into()));
}

#[test]
fn every_option_reaches_the_probe() {
    let probe = |line: &str| match parsed(&format!("cleave probe {line}")) {
        Ok(Action::Probe(probe)) => probe,
        other => panic!("{line}: {other:?}"),
    };
    let plain = probe("/d");
    assert_eq!(plain.disk, Storage::One(DiskSpec::Path("/d".into())));
    assert_eq!(probe("/a /b --stripe 64K").disk.specs().len(), 2);
    assert_eq!((plain.depth, plain.direct), (Depth::Quick, Direct::Auto));
    assert_eq!(probe("ram:1M --full").depth, Depth::Full);
    assert!(!plain.writes && !plain.destructive && !plain.allow_thin);
    assert!(plain.profile.is_none() && plain.json.is_none());
    assert_eq!(
        probe("ram:1M --seconds 7").depth,
        Depth::Within(Duration::from_secs(7))
    );
    let writes = probe("/d --writes --destructive --allow-thin --direct off");
    assert!(writes.writes && writes.destructive && writes.allow_thin);
    assert_eq!(writes.direct, Direct::Off);
    let files = probe("/d --profile p --json -");
    assert_eq!(files.profile, Some("p".into()));
    assert_eq!(files.json, Some("-".into()));
}

#[test]
fn an_upgrade_is_of_the_units_or_of_the_sockets_that_are_named() {
    let upgrade = |line: &str| match parsed(line) {
        Ok(Action::Upgrade(upgrade)) => (upgrade.check, upgrade.sockets),
        other => panic!("{line}: {other:?}"),
    };
    assert_eq!(upgrade("cleave upgrade"), (false, Vec::new()));
    let named = upgrade("cleave upgrade --check --control /a --control /b");
    assert_eq!(named, (true, vec!["/a".into(), "/b".into()]));
}

#[test]
fn demo_has_defaults_and_limits() {
    let demo = |line: &str| match parsed(line) {
        Ok(Action::Demo(demo)) => demo,
        other => panic!("{line}: {other:?}"),
    };
    let plain = demo("cleave demo --dir /d");
    assert_eq!(
        (plain.exit, plain.size_bytes, plain.time.as_secs()),
        (false, 1 << 30, 3)
    );
    assert_eq!(plain.parent, Path::new("/d"));
    let other = demo("cleave demo --exit --size 64M --seconds 1");
    assert_eq!(
        (other.exit, other.size_bytes, other.time.as_secs()),
        (true, 64 << 20, 1)
    );
    for line in [
        "--size 8M",
        "--size 1048577",
        "--size 0",
        "--seconds 0",
        "--seconds x",
    ] {
        assert!(parsed(&format!("cleave demo {line}")).is_err(), "{line}");
    }
}
