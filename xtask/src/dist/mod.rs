//! `cargo xtask dist`: a tree of all files as they are installed, and from it a tarball, a `.deb`, a `.rpm` and an image for
//! containers; a tree of the lab's, and from it a `.deb` and a `.rpm`. Source packages are built by it too.
//!
//! The program links the C library dynamically, and nothing else but libgcc_s: a statically linked glibc could load no
//! library at run time, and the packages name the oldest glibc that will do.

mod check;
mod image;
mod notice;
mod recipe;
mod source;

use std::env::consts::ARCH;
use std::fmt::Display;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cleave_rig::{At, Result, empty_folder, execute, quietly, words};
use cleave_rig::{built, setup};

use self::recipe::{Recipe, VERSION};
use crate::book;
use crate::step::step;

/// Where to, and from what.
#[derive(clap::Args, Default)]
pub(crate) struct DistArgs {
    /// Write to this folder [default: target/dist, or target/source with --source]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Package the programs in this folder of cargo's instead of building them, without the pages as HTML
    ///
    /// Such a package is for a test. A release, which is built here, has them in usr/share/doc/cleave/html, as `cargo xtask book`
    /// makes them.
    #[arg(long, value_name = "DIR")]
    programs: Option<PathBuf>,
    /// Make nothing else, as the builds of source packages do, and no pages as HTML
    #[arg(long, value_name = "PART", conflicts_with = "check")]
    only: Option<Single>,
    /// Make source packages for Debian and rpm instead, which build without network
    #[arg(long, conflicts_with_all = ["programs", "only"])]
    source: bool,
    /// Then install the .deb in a copy of this system (as root), check what is installed, and run the image for containers; with
    /// --source, build the source packages, and check what comes of them
    #[arg(long)]
    check: bool,
    /// Install it in a copy of the system in this folder instead, such as one that debootstrap has made
    #[arg(
        long,
        value_name = "DIR",
        requires = "check",
        conflicts_with = "source"
    )]
    system: Option<PathBuf>,
}

/// The part of the release that a source package is built into.
#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Single {
    /// The trees of installed files
    Tree,
    /// The .debs, from the folder `debian` of the sources where there is one
    Deb,
}

impl DistArgs {
    /// Returns the options with which the tests package the programs that they have tested, in a folder of cargo's. Building them
    /// a second time as they are released takes minutes, and tells nothing about packages.
    pub(crate) fn checked(programs: &Path) -> DistArgs {
        DistArgs {
            programs: Some(programs.to_path_buf()),
            check: true,
            ..DistArgs::default()
        }
    }
}

/// Files of the sources that the daemon's package has, and where they are installed.
const FILES: &str = "\
dist/cleave.service usr/lib/systemd/system/cleave.service
dist/cleave@.service usr/lib/systemd/system/cleave@.service
dist/cleave@.socket usr/lib/systemd/system/cleave@.socket
dist/cleave.sysusers usr/lib/sysusers.d/cleave.conf
dist/cleave.tmpfiles usr/lib/tmpfiles.d/cleave.conf
dist/50-cleave.json usr/share/qemu/vhost-user/50-cleave.json
dist/copyright usr/share/doc/cleave/copyright
LICENSE-APACHE usr/share/doc/cleave/LICENSE-APACHE
LICENSE-MIT usr/share/doc/cleave/LICENSE-MIT
dist/grafana.json usr/share/cleave/grafana.json
dist/kubernetes/daemonset.yaml usr/share/cleave/kubernetes/daemonset.yaml
dist/kubernetes/seccomp.json usr/share/cleave/kubernetes/seccomp.json";

/// Files of the sources that the lab's package has.
const LAB_FILES: &str = "\
dist/cleave-lab.copyright usr/share/doc/cleave-lab/copyright
CHANGELOG.md usr/share/doc/cleave-lab/changelog";

/// Completions as the program writes them, and where shells look for them.
const COMPLETIONS: &str = "\
cleave.bash usr/share/bash-completion/completions/cleave
_cleave usr/share/zsh/vendor-completions/_cleave
cleave.fish usr/share/fish/vendor_completions.d/cleave.fish";

/// Folder of man pages.
const MAN_PAGES: &str = "usr/share/man/man1";

/// The package of the daemon.
const DAEMON: Package = Package {
    name: "cleave",
    crates: &["cleave"],
    programs: "cleave usr/bin/cleave",
};

/// The package of the lab, which measures the daemon with the driver of the tests.
const LAB: Package = Package {
    name: "cleave-lab",
    crates: &["cleave-lab", "cleave-client"],
    programs: "\
cleave-lab usr/bin/cleave-lab
examples/drive usr/libexec/cleave-lab/drive",
};

/// The scripts of the daemon's package.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// The release that is packaged.
struct Release {
    out: PathBuf,
    recipe: Recipe,
}

/// A package of the release.
struct Package {
    name: &'static str,
    /// The crates of the programs.
    crates: &'static [&'static str],
    /// Programs as cargo names them in its folder, and where they are installed.
    programs: &'static str,
}

/// Makes all archives and `SHA256SUMS`; prints their paths.
pub(crate) fn run(root: &Path, request: &DistArgs) -> Result {
    let usual = ["target/dist", "target/source"][usize::from(request.source)];
    let out = request.out.clone().unwrap_or_else(|| root.join(usual));
    let out = std::path::absolute(&out).at(&out)?;
    if request.source {
        source::run(root, &out)?;
        return match request.check {
            true => check::rebuild(root, &out),
            false => Ok(()),
        };
    }
    let needed: &[&str] = match request.only {
        Some(Single::Tree) => &["strip"],
        Some(Single::Deb) => &["strip", "dpkg-deb", "dpkg-gencontrol"],
        None => &["strip", "dpkg-deb", "dpkg-gencontrol", "rpmbuild"],
    };
    setup::provide_programs(root, needed)?;
    let programs = match &request.programs {
        Some(programs) => std::path::absolute(programs).at(programs)?,
        None => built::released(root)?,
    };
    let recipe = Recipe::new(root, recipe::epoch(root)?)?;
    let release = Release { out, recipe };
    empty_folder(&release.out)?;
    step("tree", "see above", || release.plant(root, &programs))?;
    step("lab tree", "see above", || {
        release.plant_lab(root, &programs)
    })?;
    if request.programs.is_none() && request.only.is_none() {
        book::build(root, &release.documents(&DAEMON).join("html"))?;
    }
    if request.only != Some(Single::Tree) {
        step("debs", "see above", || release.debs(root))?;
    }
    if request.only.is_some() {
        return Ok(());
    }
    step("tarball", "see above", || release.tarball())?;
    step("rpms", "see above", || release.rpms(root))?;
    step("image", "see above", || release.image().write(&release.out))?;
    step("sums", "see above", || release.sums())?;
    match request.check {
        true => {
            let system = request.system.as_deref().unwrap_or(Path::new("/"));
            check::run(root, &release.out, &release.image(), system)
        }
        false => Ok(()),
    }
}

impl Release {
    /// Lays out the daemon's tree.
    fn plant(&self, root: &Path, programs: &Path) -> Result<String> {
        let (tree, documents) = (self.tree(&DAEMON), self.documents(&DAEMON));
        install(root, FILES, &tree)?;
        book::copy(root, &book::index::pages(root)?, &documents)?;
        // Where Debian's programs look for it.
        let changelog = [documents.join("changelog.md"), documents.join("changelog")];
        copy(&changelog[0], &changelog[1], 0o644)?;
        let settings = tree.join("etc/cleave");
        fs::create_dir_all(&settings).at(&settings)?;
        let pages = self.write_pages(&DAEMON, &programs.join("cleave"), "--write-pages")?;
        install(&pages, COMPLETIONS, &tree)?;
        self.finish(root, &DAEMON, programs)
    }

    /// Lays out the lab's tree.
    fn plant_lab(&self, root: &Path, programs: &Path) -> Result<String> {
        install(root, LAB_FILES, &self.tree(&LAB))?;
        self.write_pages(&LAB, &programs.join("cleave-lab"), "write-pages")?;
        self.finish(root, &LAB, programs)
    }

    /// The tree of installed files of a package.
    fn tree(&self, package: &Package) -> PathBuf {
        self.out.join(package.name)
    }

    /// Folder of a package's pages: as Markdown for hosts without a browser, each with links to the others.
    fn documents(&self, package: &Package) -> PathBuf {
        self.tree(package).join("usr/share/doc").join(package.name)
    }

    /// Has a program write its man pages, and completions, into the folder of man pages, which is returned.
    fn write_pages(&self, package: &Package, program: &Path, how: &str) -> Result<PathBuf> {
        let folder = self.tree(package).join(MAN_PAGES);
        empty_folder(&folder)?;
        let (program, to) = (program.display(), folder.display());
        quietly(&self.out, "{} {} {}", &[&program, &how, &to])?;
        Ok(folder)
    }

    /// Adds what every package has: programs, licences, and only man pages where they belong, packed.
    fn finish(&self, root: &Path, package: &Package, programs: &Path) -> Result<String> {
        let (tree, documents) = (self.tree(package), self.documents(package));
        for (from, to) in pairs(package.programs) {
            let to = tree.join(to);
            copy(&programs.join(from), &to, 0o755)?;
            quietly(root, "strip {}", &[&to.display()])?;
        }
        let notices = documents.join("THIRD-PARTY");
        fs::write(&notices, notice::third_party(root, package.crates)?).at(&notices)?;
        quietly(&documents, "gzip -9n changelog", &[])?;
        let pack = "find . -type f ! -name '*.1' -delete && gzip -9n *.1";
        quietly(&tree.join(MAN_PAGES), "sh -c {}", &[&pack])?;
        Ok(format!("{} KiB", kib(&tree)?))
    }

    fn tarball(&self) -> Result<String> {
        let (name, epoch) = (format!("cleave-{VERSION}"), &self.recipe.epoch);
        let file = format!("{name}-{ARCH}-linux.tar.gz");
        let line = format!(
            "tar --sort=name --owner=0 --group=0 --mtime=@{epoch} --transform=s,^\\.,{name}, -C {} -czf {file} .",
            DAEMON.name
        );
        quietly(&self.out, &line, &[]).map(|_| file)
    }

    /// Makes the `.deb` of each package.
    fn debs(&self, root: &Path) -> Result<String> {
        let (own, made) = (root.join("debian"), self.out.join("debian"));
        // Of a source package, which somebody may have changed.
        let debian = match own.is_dir() {
            true => own,
            false => {
                self.recipe.write_debian(&made)?;
                made
            }
        };
        let files = [&DAEMON, &LAB].map(|package| self.deb(&debian, package));
        Ok(files.into_iter().collect::<Result<Vec<_>>>()?.join(", "))
    }

    fn deb(&self, debian: &Path, package: &Package) -> Result<String> {
        let (name, folder) = (package.name, self.out.join("deb"));
        quietly(&self.out, "cp -a {} {}", &[&name, &folder.display()])?;
        let scripts = SCRIPTS.iter().filter(|_| name == DAEMON.name);
        for script in scripts {
            let to = folder.join("DEBIAN").join(script);
            copy(&debian.join(script), &to, 0o755)?;
        }
        let overrides = folder.join("usr/share/lintian/overrides").join(name);
        let given = debian.join(format!("{name}.lintian-overrides"));
        copy(&given, &overrides, 0o644)?;
        let documents = folder.join("usr/share/doc").join(name);
        let changelog = documents.join("changelog.Debian");
        copy(&debian.join("changelog"), &changelog, 0o644)?;
        quietly(&documents, "gzip -9n changelog.Debian", &[])?;
        fs::create_dir_all(folder.join("DEBIAN")).at(&folder)?;
        let libraries = format!("libc6 (>= {}), libgcc-s1", self.glibc(package)?);
        let line =
            "dpkg-gencontrol -p{} -c{}/control -l{}/changelog -f{}/files -Pdeb -Vshlibs:Depends={}";
        let from = debian.display();
        quietly(&self.out, line, &[&name, &from, &from, &from, &libraries])?;
        // It notes the name of the file there, which has the version of the changelog.
        let list = debian.join("files");
        let noted = fs::read_to_string(&list).at(&list)?;
        let front = format!("{name}_");
        let noted = noted.lines().find(|line| line.starts_with(&front));
        let file = noted.and_then(|line| line.split(' ').next());
        let file = file.ok_or("dpkg-gencontrol names no file")?.to_owned();
        let line = "env SOURCE_DATE_EPOCH={} dpkg-deb --root-owner-group -Zxz -z1 --build deb {}";
        quietly(&self.out, line, &[&self.recipe.epoch, &file])?;
        fs::remove_dir_all(&folder).at(&folder)?;
        Ok(file)
    }

    /// Makes the `.rpm` of each package.
    fn rpms(&self, root: &Path) -> Result<String> {
        let (build, spec) = (self.out.join("rpm"), self.out.join("cleave.spec"));
        self.recipe.write_spec(&spec)?;
        let name = "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm";
        let epoch = &self.recipe.epoch;
        let mut line = words("env SOURCE_DATE_EPOCH={} rpmbuild -bb", &[epoch]);
        let definitions: [(&str, &dyn Display); 4] = [
            ("_topdir", &build.display()),
            ("_rpmdir", &self.out.display()),
            ("_build_name_fmt", &name),
            ("cleave_trees", &self.out.display()),
        ];
        line.extend(definitions.map(|(name, value)| format!("--define={name} {value}")));
        line.push(spec.display().to_string());
        execute(root, &line)?;
        fs::remove_dir_all(&build).at(&build)?;
        let files = [&DAEMON, &LAB].map(|made| format!("{}-{VERSION}-1.{ARCH}.rpm", made.name));
        Ok(files.join(", "))
    }

    /// Returns the newest version of glibc whose symbols the programs of a package need; their files name each of them.
    fn glibc(&self, package: &Package) -> Result<String> {
        let mut newest = None;
        for (_, installed) in pairs(package.programs) {
            let program = self.tree(package).join(installed);
            let bytes = fs::read(&program).at(&program)?;
            let text = String::from_utf8_lossy(&bytes);
            let versions = text.split("GLIBC_2.").skip(1).filter_map(|rest| {
                let end = rest.find(|c: char| !c.is_ascii_digit())?;
                rest.get(..end)?.parse::<u32>().ok()
            });
            newest = newest.max(versions.max());
        }
        let newest = newest.ok_or("the programs need no glibc")?;
        Ok(format!("2.{newest}"))
    }

    fn image(&self) -> image::OciImage<'_> {
        image::OciImage {
            tree: self.tree(&DAEMON),
            epoch: &self.recipe.epoch,
            version: VERSION,
        }
    }

    fn sums(&self) -> Result<String> {
        let sum = "sha256sum *.tar.gz *.deb *.rpm *-oci.tar > SHA256SUMS";
        quietly(&self.out, "sh -c {}", &[&sum])?;
        Ok(self.out.join("SHA256SUMS").display().to_string())
    }
}

/// Returns the lines of a list: what, and where to.
fn pairs(list: &str) -> impl Iterator<Item = (&str, &str)> {
    list.lines().filter_map(|line| line.split_once(' '))
}

/// Copies the files of a list from a folder into a tree.
fn install(folder: &Path, files: &str, tree: &Path) -> Result {
    pairs(files).try_for_each(|(from, to)| copy(&folder.join(from), &tree.join(to), 0o644))
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result {
    let folder = to.parent().unwrap_or(to);
    fs::create_dir_all(folder).at(folder)?;
    fs::copy(from, to).at(from)?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).at(to)
}

/// Returns the size of a folder, as `du` prints it before the name.
fn kib(folder: &Path) -> Result<String> {
    let said = quietly(folder, "du -sk .", &[])?;
    Ok(said.split_whitespace().next().unwrap_or("0").to_owned())
}
