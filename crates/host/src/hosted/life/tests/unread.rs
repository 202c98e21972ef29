//! A disk whose file could not be read when the host started.

use super::*;

/// The host has no memory for a moment, or the file system of its state is away.
#[tokio::test(start_paused = true)]
async fn a_file_that_cannot_be_read_at_present_is_read_again_and_its_disk_served() {
    let start = Instant::now();
    let scene = Scene::unread(|_| ());
    assert_eq!(scene.state(), "failed");
    sleep(Duration::from_secs(40)).await;
    assert_eq!(scene.tries(start), [1, 3, 7, 15, 31]);
    let asked = Instant::now();
    let start = || scene.disk.ask(DiskRequest::Start);
    let refused = Err((422, "d1.toml: I/O error".to_owned()));
    assert_eq!(told(start().await), refused);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(scene.tries(asked), [0, 1]);
    *lock(&scene.host.unread) = None;
    assert_eq!(told(start().await), Ok(()));
    assert_eq!(scene.disk.shown().config, disk("ram:1M"));
    let told = scene.host.told();
    assert_eq!(
        told,
        ["failed", "open ram:1M, CameBack", "opening", "serving"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_read_again_and_says_no_disk_is_not_read_any_more() {
    let start = Instant::now();
    let scene = Scene::unread(|_| ());
    let lasting = FileFault::Lasting("d1.toml: line 1".to_owned());
    *lock(&scene.host.unread) = Some(lasting);
    sleep(Duration::from_secs(40)).await;
    assert_eq!(scene.tries(start), [1]);
    let started = told(scene.disk.ask(DiskRequest::Start).await);
    assert_eq!(started, Err((422, "d1.toml: line 1".to_owned())));
    assert_eq!(scene.put(&disk("ram:2M")).await.unwrap(), Ok(Placed::New));
}

#[tokio::test(start_paused = true)]
async fn a_put_replaces_a_file_that_is_being_read_unless_it_is_refused() {
    let scene = Scene::unread(|host| host.works.close());
    sleep(Duration::from_secs(2)).await;
    scene.host.break_disk("ram:2M", "away");
    let refused = scene.put(&disk("ram:2M")).await.unwrap();
    assert_eq!(refused, Err((422, "away".to_owned())));
    // It is read by the next attempt, which begins anew.
    *lock(&scene.host.unread) = None;
    scene.host.works.let_pass(1);
    scene.reaches("serving").await;
    assert_eq!(scene.disk.shown().config, disk("ram:1M"));
    let scene = Scene::unread(|host| host.works.close());
    sleep(Duration::from_secs(2)).await;
    let put = scene.put(&disk("ram:3M"));
    scene.reaches("serving").await;
    scene.host.works.let_pass(1);
    assert_eq!(put.await.unwrap(), Ok(Placed::New));
    assert_eq!(scene.host.file("d1"), Some(disk("ram:3M")));
    sleep(Duration::from_secs(40)).await;
    assert_eq!(scene.disk.shown().config, disk("ram:3M"));
}

/// A VMM that cannot connect again goes on when the file is read, by this process or the next one.
#[tokio::test(start_paused = true)]
async fn what_was_left_of_a_disk_whose_file_cannot_be_read_waits_for_it() {
    let awaited = |host: &Invented| *lock(&host.is_awaited) = true;
    let scene = Scene::unread(awaited);
    sleep(Duration::from_secs(2)).await;
    assert!(scene.disk.shown().is_awaited);
    scene.keeps_its_frontend().await;
    let manager = Arc::new(Manager::from_environment());
    let order = DiskRequest::HandOver("the host ends".to_owned(), manager);
    scene.disk.order(order).await;
    scene.disk.gone().await;
    assert_eq!(scene.host.told(), ["failed", "leave d1", "ending", "ended"]);
    assert_eq!(scene.host.file("d1"), Some(disk("ram:1M")));
    let scene = Scene::unread(awaited);
    assert_eq!(scene.delete(DeleteMode::Drain).await.unwrap(), Ok(None));
    assert_eq!(scene.host.file("d1"), None);
    let told = scene.host.told();
    assert_eq!(told.last().unwrap(), "forgotten");
}
