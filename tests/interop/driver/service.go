package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// firstBanner is what the service that speaks first says.
const firstBanner = "culvert-first\n"

// runService serves what the other subcommands ask for behind an agent, until
// it is told to stop. Its first output line names the addresses.
//
// On the raw address a client sends one line: "download N" is answered with N
// bytes of the stream and the end of the service's direction, "upload N" and N
// bytes with their hex SHA-256 and a line feed, and "echo" with everything that
// follows.
func runService(args []string) (result, error) {
	fs := flag.NewFlagSet("service", flag.ContinueOnError)
	addrs := map[string]*string{}
	services := map[string]func(*net.TCPConn) error{"raw": serveRaw, "first": serveFirst, "half": serveHalf, "silent": serveSilent}
	addrs["raw"] = fs.String("listen", "127.0.0.1:0", "raw service")
	for name, what := range map[string]string{
		"first":  "service that sends a banner at once, then echoes",
		"half":   "service that counts bytes to the end, then answers with the count",
		"silent": "service that accepts and does nothing",
		"http":   "HTTP service with /, /bytes/N and /echo",
	} {
		addrs[name] = fs.String(name+"-listen", "", what)
	}
	if err := parse(fs, args); err != nil {
		return nil, err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	open := result{"event": "listening"}
	for name, addr := range addrs {
		if *addr == "" {
			continue
		}
		l, err := net.Listen("tcp", *addr)
		if err != nil {
			return nil, err
		}
		defer l.Close()
		open[name] = l.Addr().String()
		if name == "http" {
			go http.Serve(l, web())
			continue
		}
		go accept(l, name, services[name])
	}
	emit(open)
	<-ctx.Done()
	return nil, nil
}

// accept serves every connection and logs how it ended.
func accept(l net.Listener, name string, serve func(*net.TCPConn) error) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			start := time.Now()
			err := serve(c.(*net.TCPConn))
			log.Printf("%s %v ended after %v: %v", name, c.RemoteAddr(), time.Since(start).Round(time.Millisecond), err)
		}()
	}
}

func serveRaw(c *net.TCPConn) error {
	in := bufio.NewReaderSize(c, chunk)
	line, err := in.ReadString('\n')
	if err != nil {
		return fmt.Errorf("no verb: %w", err)
	}
	verb, arg, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
	if verb == "echo" {
		_, err := io.Copy(c, in)
		return err
	}
	n, err := strconv.ParseInt(arg, 10, 64)
	if err != nil || n < 0 {
		return fmt.Errorf("bad line %q", line)
	}
	switch verb {
	case "download":
		if err := writeStream(c, n, chunk); err != nil {
			return err
		}
		if err := c.CloseWrite(); err != nil {
			return err
		}
		rest, err := io.Copy(io.Discard, in)
		return fmt.Errorf("download done, then %d bytes from the client, end %v", rest, err)
	case "upload":
		h := sha256.New()
		if got, err := io.CopyN(h, in, n); err != nil {
			return fmt.Errorf("upload ended after %d of %d bytes: %w", got, n, err)
		}
		if _, err = fmt.Fprintln(c, hex.EncodeToString(h.Sum(nil))); err != nil {
			return err
		}
		// Closing with unread bytes would reset the connection and lose the answer.
		_, err = io.Copy(io.Discard, in)
		return err
	}
	return fmt.Errorf("bad line %q", line)
}

func serveFirst(c *net.TCPConn) error {
	if _, err := io.WriteString(c, firstBanner); err != nil {
		return err
	}
	_, err := io.Copy(c, c)
	return err
}

func serveHalf(c *net.TCPConn) error {
	n, err := io.Copy(io.Discard, c)
	if err != nil {
		return fmt.Errorf("after %d bytes: %w", n, err)
	}
	_, err = fmt.Fprintln(c, n)
	return errors.Join(err, c.CloseWrite())
}

// serveSilent holds the connection for as long as the process lives, so that
// nothing is read from it and no close is noticed.
func serveSilent(*net.TCPConn) error { select {} }

func web() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello\n") })
	mux.HandleFunc("GET /bytes/{n}", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
		if err != nil || n < 0 {
			http.Error(w, "bad number", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		if err := writeStream(w, n, chunk); err != nil {
			log.Print(err)
		}
	})
	mux.HandleFunc("POST /echo", func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
	return mux
}
