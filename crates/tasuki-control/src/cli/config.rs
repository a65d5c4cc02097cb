//! `tasuki config`: the configuration as it is now, and its JSON Schema.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use hyper::Method as Verb;

use super::{Reach, show, write};
use crate::api::client;
use crate::api::types::Written;
use crate::{config, place};

/// Subcommands about the configuration.
#[derive(Debug, Subcommand)]
pub enum Configs {
    /// Print nodes and NICs as they are now, with all that was changed by hand, as a configuration: to keep, and to begin
    /// with again.
    Show {
        /// Write it to this file instead: the whole of it, or nothing.
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// Print the JSON Schema of configurations: editors complete and check a file by it.
    Schema,
}

/// Carries one of them out.
pub fn run(reach: &Reach, configs: &Configs) -> Result<()> {
    let Configs::Show { to } = configs else { return write(&config::schema::text()).map(drop) };
    let folder = reach.dir.clone().unwrap_or_else(place::asked);
    let answer = client::ask(&folder, Verb::GET, "/v1/configuration", None)?;
    let Written { generation, text } = show::read(answer.clone())?;
    if let Some(file) = to {
        let named = file.display();
        let why = || format!("nothing was written to {named}, which is what it was; name another file");
        replace(file, &text).with_context(why)?;
    }
    match to {
        _ if reach.json => write(&(serde_json::to_string_pretty(&answer)? + "\n")),
        Some(file) => write(&format!(
            "generation {generation} is in {}; tasuki up {} brings it back\n",
            file.display(),
            file.display()
        )),
        None => write(&text),
    }
    .map(drop)
}

/// Writes a file: the whole of it, or nothing. It is for its owner alone, also if one was there that was not: it may have
/// secrets in it.
fn replace(file: &Path, text: &str) -> Result<()> {
    // Through a link, to the file that it names, though that may not be there yet.
    let file = match (std::fs::canonicalize(file), std::fs::read_link(file)) {
        (Ok(file), _) => file,
        (Err(_), Ok(target)) => file.parent().unwrap_or(Path::new("")).join(target),
        (Err(_), Err(_)) => file.to_owned(),
    };
    ensure!(std::fs::metadata(&file).ok().is_none_or(|before| before.is_file()), "it is no file");
    let (aside, mut new) = beside(&file)?;
    let written = (|| {
        new.write_all(text.as_bytes())?;
        new.sync_all()?;
        std::fs::rename(&aside, &file)?;
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()
    })();
    written.inspect_err(|_: &io::Error| drop(std::fs::remove_file(&aside)))?;
    Ok(())
}

/// Makes a file beside this one, with a name that no other file has. Returns its path, too.
fn beside(file: &Path) -> io::Result<(PathBuf, File)> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let mut attempts = 0..100;
    loop {
        let number = attempts.next();
        let aside = file.with_file_name(format!(".{name}.{}-{}.tasuki", std::process::id(), number.unwrap_or(100)));
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number.is_some() => {}
            made => return made.map(|new| (aside, new)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_that_was_there_is_its_owners_alone_afterwards_and_stays_whole_on_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("kept.toml");
        let mode = || file.metadata().expect("it is there").permissions().mode() & 0o777;
        fs::write(&file, "of the last time").expect("a file");
        fs::set_permissions(&file, Permissions::from_mode(0o644)).expect("a mode");
        let names = || fs::read_dir(folder.path()).expect("a folder").flatten().count();
        // Files where the new one could be.
        let aside = |number| folder.path().join(format!(".kept.toml.{}-{number}.tasuki", std::process::id()));
        (0..=100).for_each(|number| fs::write(aside(number), "another's").expect("a file"));
        replace(&file, "secrets").expect_err("there is no room for it");
        assert_eq!((fs::read_to_string(&file).expect("text"), mode()), ("of the last time".to_owned(), 0o644));
        fs::remove_file(aside(7)).expect("a file");
        // An editor's draft.
        let draft = folder.path().join("kept.toml.new");
        fs::write(&draft, "a draft").expect("a file");
        replace(&file, "secrets").expect("a file of ours");
        assert_eq!((fs::read_to_string(&file).expect("text"), mode()), ("secrets".to_owned(), 0o600));
        assert_eq!((fs::read_to_string(&draft).expect("text"), names()), ("a draft".to_owned(), 102));
        // A link to a file that is not there yet.
        let link = folder.path().join("link.toml");
        std::os::unix::fs::symlink("aim.toml", &link).expect("a link");
        replace(&link, "secrets").expect("a file of ours");
        assert_eq!(fs::read_to_string(folder.path().join("aim.toml")).expect("text"), "secrets");
        assert!(link.is_symlink());
    }
}
